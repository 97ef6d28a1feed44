"""One plain function per command, each a short list of named steps. Read this first."""

from pathlib import Path

from pipeline.config import (
    AttentionConfig,
    EmbedConfig,
    EvaluateConfig,
    ExportConfig,
    GenerateConfig,
    ImportConfig,
    PredictConfig,
)
from pipeline.configuration import to_yaml
from pipeline.data import catalogue
from pipeline.data.cleaning import Notes
from pipeline.data.config import (
    CorpusConfig,
    DataGetConfig,
    DataListConfig,
    InspectConfig,
    PrepareConfig,
    TokenizerCompareConfig,
    TokenizerTrainConfig,
)
from pipeline.data.corpus import Corpus, scan
from pipeline.data.inspection import print_corpus, print_splits, print_store, print_tokenizers
from pipeline.data.sources import sources
from pipeline.data.store import prepare_store
from pipeline.errors import UserError
from pipeline.evaluation.config import StudyConfig
from pipeline.files import check_output, write_json, write_text
from pipeline.terminal import note, print_table, progress, reported, say
from pipeline.tokenizer import Tokenizer, is_learnt_from, measure, special_tokens, train
from pipeline.training.config import FinetuneConfig, PretrainConfig, RunBundleConfig, RunsConfig, SyncConfig
from pipeline.training.run import RUNS_HEADER, Run, describe, rank, runs_below


def list_data(_: DataListConfig) -> None:
    """Show the catalogue."""
    print_table("Catalogue", catalogue.HEADER, catalogue.rows())


def get_data(config: DataGetConfig) -> None:
    """Fetch a catalogue entry and print its folder."""
    say(str(catalogue.get(config.name)))


def inspect_corpus(config: InspectConfig) -> None:
    """Show what is in a corpus and what would become of it."""
    print_corpus(scan(config))


def train_tokenizer(config: TokenizerTrainConfig) -> None:
    """Train a tokenizer on the training part of a corpus and save it."""
    special_tokens(config)  # a mistake in the settings should not cost a reading of the corpus
    output = Path(config.output)
    check_output(output, {"meta.json"}, (output / "tokenizer.json").is_file())
    corpus = scan(config)
    print_splits(corpus)
    if not is_trained(config, corpus):
        with progress("counting words", corpus.bytes("train"), "bytes") as advance:
            tokenizer = train(reported(corpus.texts("train"), advance), config, corpus.fingerprint)
        write_json(output / "meta.json", tokenizer.meta)  # first: a tokenizer.json without one is somebody else's
        tokenizer.save(output)
        write_text(output / "config.yaml", to_yaml(config))
    tokenizer = Tokenizer.load(config.output)
    measured = measure(tokenizer, corpus.texts("validation"))
    print_tokenizers("On the held-out text", [(config.output, tokenizer, measured)])
    say(config.output)


def compare_tokenizers(config: TokenizerCompareConfig) -> None:
    """Measure several tokenizers on one text."""
    loaded = [(name, Tokenizer.load(name)) for name in config.tokenizers]
    found = sources(CorpusConfig(corpus=config.text, text_column=config.text_column))
    texts = [text for source in found if (text := source.read(Notes()))]
    if not texts:
        raise UserError(f"{', '.join(config.text)}: no text in it to compare tokenizers on")
    title = f"On {', '.join(config.text)}"
    print_tokenizers(title, [(name, tokenizer, measure(tokenizer, texts)) for name, tokenizer in loaded])


def prepare(config: PrepareConfig) -> None:
    """Turn a corpus into a token store and print its folder."""
    tokenizer = Path(config.tokenizer)
    Tokenizer.load(tokenizer).id("end")  # before the corpus is read: a mistake here should not cost minutes
    corpus = scan(config)
    print_splits(corpus)
    store = prepare_store(corpus, tokenizer, Path(config.output))
    if not (store.path / "config.yaml").exists():  # it says what made the store, not who used it last
        write_text(store.path / "config.yaml", to_yaml(config))
    print_store(store)
    say(str(store.path))


def pretrain(config: PretrainConfig) -> None:
    """Pretrain a model from raw text and print the folder of its bundle."""
    from pipeline.training import pretraining

    if config.dry_run:
        pretraining.try_out(config)
        return
    bundle = pretraining.pretrain(config)
    if rank() == 0:
        say(str(bundle))


def finetune(config: FinetuneConfig) -> None:
    """Fine-tune a model on a task, once or with several seeds, and print the folders of the bundles."""
    if config.seeds > 1:
        from pipeline.training.seeds import finetune_seeds

        for bundle in finetune_seeds(config):
            say(str(bundle))
        return
    from pipeline.training import finetuning

    bundle = finetuning.finetune(config)
    if rank() == 0:
        say(str(bundle))


def evaluate(config: EvaluateConfig) -> None:
    """Measure a bundle on rows."""
    from pipeline.answers import evaluate

    evaluate(config)


def predict(config: PredictConfig) -> None:
    """Do a bundle's task on texts."""
    from pipeline.answers import predict

    predict(config)


def embed(config: EmbedConfig) -> None:
    """Turn texts into vectors."""
    from pipeline.answers import embed

    embed(config)


def compare(config: StudyConfig) -> None:
    """Plan and run a study, and print the page that says what it found."""
    from pipeline.evaluation.study import plan_study, print_plan, run_study

    study = plan_study(config)
    print_plan(study)
    if config.dry_run:
        from pipeline.evaluation.calibration import print_estimate

        print_estimate(study)
        return
    from pipeline.evaluation.findings import find
    from pipeline.evaluation.report import write_report
    from pipeline.training.server import publish_if_online

    failed = run_study(study)
    say(str(write_report(find(study, failed))))
    publish_if_online(study.folder)
    if failed:
        raise UserError(f"{len(failed)} jobs are not done ({failed[0]}); mend that, then the same command goes on")


def generate(config: GenerateConfig) -> None:
    """Print what a model writes."""
    from pipeline.inference import write_on

    for text in write_on(config):
        say(text)


def draw_attention(config: AttentionConfig) -> None:
    """Draw attention and print the pictures' names."""
    from pipeline.inference import draw_attention

    for path in draw_attention(config):
        say(str(path))


def list_runs(config: RunsConfig) -> None:
    """Show the runs in a folder."""
    print_table("Runs", RUNS_HEADER, [describe(run) for run in runs_below(Path(config.folder))])


def bundle_run(config: RunBundleConfig) -> None:
    """Make a bundle of a checkpoint of a run and print its folder."""
    from pipeline.training.results import bundle_of

    say(str(bundle_of(Run(Path(config.run)), config.step, config.output)))


def sync_runs(config: SyncConfig) -> None:
    """Upload what was tracked offline."""
    from pipeline.training.server import sync

    for folder in config.folders:
        sync(Path(folder))


def import_bundle(config: ImportConfig) -> None:
    """Make a bundle of a model of transformers."""
    from pipeline.bundle import check_target, save_bundle
    from pipeline.model.huggingface import import_model

    check_target(Path(config.bundle), "imported_from", config.source)
    save_bundle(import_model(config.source), Path(config.bundle))
    say(config.bundle)


def export_bundle(config: ExportConfig) -> None:
    """Write a bundle in the form of transformers."""
    from pipeline.bundle import load_bundle
    from pipeline.model.huggingface import export_model

    export_model(load_bundle(Path(config.bundle)), Path(config.folder))
    say(config.folder)


def is_trained(config: TokenizerTrainConfig, corpus: Corpus) -> bool:
    """Whether the tokenizer asked for is there already; another one in its place is never overwritten."""
    if not (Path(config.output) / "tokenizer.json").exists():
        return False
    if not is_learnt_from(config.output, corpus.fingerprint, config):
        raise UserError(
            f"{config.output}: holds a tokenizer trained on other text or with other settings; "
            "choose another --output, or delete it if nothing uses it"
        )
    note(f"{config.output}: trained before on this text with these settings")
    return True
