"""Pretraining from raw text to a bundle: the material, the training, and what is handed on."""

import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from pipeline.bundle import Bundle, Model, load_bundle, make_model, save_bundle
from pipeline.configuration import build
from pipeline.data.catalogue import cache
from pipeline.data.config import TokenizerConfig
from pipeline.data.corpus import SPLITS, scan
from pipeline.data.datamodule import Share, Steps
from pipeline.data.store import MANIFEST, Store, prepare_store
from pipeline.data.windows import Windows
from pipeline.errors import UserError
from pipeline.files import described, fingerprint, read_json
from pipeline.model.config import ModelConfig, resolve, unused, with_dropout
from pipeline.model.recurrent import Recurrent
from pipeline.terminal import note, progress, reported, warn
from pipeline.tokenizer import Tokenizer, is_learnt_from, train
from pipeline.training import checkpoint, tracking
from pipeline.training.callbacks import Keeper
from pipeline.training.checkpoint import Checkpoint
from pipeline.training.config import PretrainConfig, check_positions
from pipeline.training.fit import check_devices, fit
from pipeline.training.job import Job, total_steps
from pipeline.training.module import Training, trained_numbers
from pipeline.training.run import Run, opened, rank
from pipeline.training.tracking import Input
from pipeline.training.validation import show_attention, take_samples, validate


def pretrain(config: PretrainConfig) -> Path:
    """Do the whole job and return the bundle's folder; a run that was stopped goes on, a finished one is left alone."""
    with opened(config, f"pretrain-{config.model.family}-{config.model.size}") as run:
        if run.finished:
            note(f"{run.path}: finished before")
            return run.bundle
        job = make_job(config, run)
        if rank() == 0:
            note(job.plan())
            run.add_material({"steps": job.total_steps})
        train_job(job, run)
    return run.bundle


def try_out(config: PretrainConfig) -> None:
    """Show the plan and prove that a step and a validation work, in a folder that is deleted afterwards."""
    folder = Path(f".dry-run-{fingerprint(asdict(config))[:8]}")  # all processes must find the same
    quiet = replace(config.tracking, mode="disabled", samples_every=0)
    once = replace(config, dry_run=False, resume=None, run_dir=str(folder), tracking=quiet)
    try:
        with opened(once, "dry-run") as run:
            job = make_job(once, run)
            if rank() == 0:
                note(job.plan())
            batch = job.share.micro_batch * job.share.processes
            short = replace(once, trainer=replace(once.trainer, max_steps=1, validation_samples=batch))
            train_job(replace(job, config=short, total_steps=1), run)
    finally:
        if rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if rank() == 0:
        note("dry run: one step and one validation batch work; only the token store is kept")


# --- Material ----------------------------------------------------------------------------------------------------


def make_material(config: PretrainConfig, run: Run, start: Bundle | None) -> tuple[Tokenizer, Store]:
    """The tokenizer and the token store of a run; process 0 makes them, the others wait."""
    folder = run.path / "tokenizer"
    if rank() == 0 and not is_material(run):
        named = start.tokenizer if start else config.data.tokenizer and Tokenizer.load(config.data.tokenizer)
        if named:
            named.save(folder)
        corpus = scan(config.data)
        sizes = ", ".join(f"{corpus.bytes(split) / 1e6:.1f} MB for {split}" for split in SPLITS if corpus.bytes(split))
        note(f"corpus of {len(corpus.entries):,} documents: {sizes}")
        if not (named or has_tokenizer(run, corpus.fingerprint, config.data.new_tokenizer)):
            with progress("counting words", corpus.bytes("train"), "bytes") as advance:
                texts = reported(corpus.texts("train"), advance)
                train(texts, config.data.new_tokenizer, corpus.fingerprint).save(folder)
        stores = Path(config.data.stores) if config.data.stores else cache() / "stores"
        store = prepare_store(corpus, folder, stores)
        run.add_material({"store": str(store.path.resolve()), "corpus": corpus.fingerprint})
    while "store" not in run.material:
        time.sleep(0.2)
    tokenizer = Tokenizer.load(folder)
    return tokenizer, Store.open(Path(run.material["store"]), tokenizer.fingerprint)


def has_tokenizer(run: Run, text: str, settings: TokenizerConfig) -> bool:
    """Whether the run has its tokenizer: before it begins, one that this text and these settings make."""
    folder = run.path / "tokenizer"
    return (folder / "meta.json").is_file() if run.begun else is_learnt_from(folder, text, settings)


def is_material(run: Run) -> bool:
    """Whether tokenizer and store were made before and are still there; the corpus is not read again then."""
    return "store" in run.material and (Path(run.material["store"]) / MANIFEST).is_file()


def named_start(config: PretrainConfig) -> Bundle | None:
    """The bundle to go on from, if one is named; a mistake here should not cost a reading of the corpus."""
    if config.init_from is None:
        return None
    bundle = start_bundle(config.init_from, config.model)
    family, tokenizer = bundle.model.architecture.family, config.data.tokenizer
    if family != config.model.family:
        raise UserError(
            f"init_from: {config.init_from} is of family {family}, model.family is {config.model.family}; "
            "pretraining goes on within a family"
        )
    check_positions(bundle.model.architecture, config.data.sequence_length)
    if tokenizer and Tokenizer.load(tokenizer).fingerprint != bundle.tokenizer.fingerprint:
        raise UserError(f"data.tokenizer: {tokenizer} is not the tokenizer of {config.init_from}; leave it out")
    return bundle


def start_bundle(source: str, settings: ModelConfig) -> Bundle:
    """A bundle, or a model of transformers as one; of the settings it takes the dropout, where they name any."""
    if (Path(source) / "meta.json").is_file():
        bundle = load_bundle(Path(source))
        bundle.model.classifier = None  # of the task it was fine-tuned for; the next one has its own
    else:
        from pipeline.model.huggingface import import_model

        bundle = import_model(source)
    architecture = with_dropout(bundle.model.architecture, settings)
    if settings.prefix_attention and architecture.family == "decoder":
        architecture = replace(architecture, prefix_attention=settings.prefix_attention)
    if lost := unused(architecture, settings):
        warn(f"{source} keeps its own model: model.{', model.'.join(lost)} of the settings have no effect")
    if architecture != bundle.model.architecture:
        model = make_model(architecture, bundle.model.vocab_size)
        model.load_state_dict(bundle.model.state_dict())
        bundle.model = model
    return bundle


def start_model(config: PretrainConfig, start: Bundle | None, vocab_size: int) -> Model:
    """The model of the bundle to go on from, or a new one, the same for the same seed."""
    torch.manual_seed(config.seed)
    model = start.model.train() if start else make_model(resolve(config.model), vocab_size)
    if isinstance(model, Recurrent):  # causal pretraining uses its decoder alone
        for part in filter(None, (model.encoder, model.bridge, model.attention)):
            part.requires_grad_(False)
    if model.architecture.family == "decoder":  # it goes on from a prompt as it has learnt to read one
        both_ways = config.objective.names("decoder")[-1] == "prefix"
        reads = "bidirectional" if both_ways else config.model.prefix_attention or "causal"
        model.architecture = replace(model.architecture, prefix_attention=reads)
    return model


# --- The job ---------------------------------------------------------------------------------------------------------


def make_job(config: PretrainConfig, run: Run) -> Job:
    """Make everything that a run needs; mistakes show here, before anything is trained."""
    check_devices(config.trainer)
    start = named_start(config)
    tokenizer, store = make_material(config, run, start)
    store.stream("validation")  # fails here if there is none, not at the first validation
    data, trainer = config.data, config.trainer
    windows = Windows(store.stream("train"), data.sequence_length, within_documents=data.within_documents)
    if data.batch_size > len(windows):
        raise UserError(
            f"data.batch_size: {data.batch_size} windows of {data.sequence_length} tokens, but the training text has "
            f"only {len(windows)}; use a smaller batch or more text"
        )
    own = -(-data.batch_size // trainer.processes)
    share = Share(rank(trainer.devices), trainer.processes, min(data.micro_batch_size or own, own))
    steps = Steps(len(windows), data.batch_size, config.seed)
    total = total_steps(trainer, steps.per_epoch, len(store.stream("train")))
    job = Job(config, tokenizer, store, start_model(config, start, tokenizer.vocab_size), steps, share, total)
    job.first_batch()  # an objective that the tokenizer lacks tokens for fails here
    return job


def train_job(job: Job, run: Run) -> None:
    """Train, measure, and write the bundle."""
    module = job.training()
    with start_tracking(job, run) as tracker:
        shown = job.config.tracking
        routines = [
            (shown.samples_every, lambda: take_samples(job, module, run, tracker)),
            (shown.attention_every, lambda: show_attention(job, module, run, tracker)),
        ]
        measured = fit(module, job.loader, Keeper(run, tracker, lambda: validate(job, module), routines))
        write_bundle(job, module, measured, run, tracker)


def start_tracking(job: Job, run: Run) -> tracking.Tracker:
    """Begin to track, in process 0 alone."""
    config = job.config
    facts = {
        "stage": "pretrain",
        "family": config.model.family,
        "objective": job.objective_words(),
        "preset": config.model.preset,
        "size": config.model.size,
        "parameters": trained_numbers(job.model),
        "seed": config.seed,
        "dataset": ", ".join(config.data.corpus),
    }
    inputs = [Input("corpus", "corpus", job.store.corpus), Input("tokenizer", "tokenizer", job.tokenizer.fingerprint)]
    if config.init_from and (Path(config.init_from) / "meta.json").is_file():
        inputs.append(bundle_input(read_json(Path(config.init_from) / "meta.json")))
    tracker = tracking.start(config.tracking, run.path, asdict(config), facts, inputs, enabled=rank() == 0)
    tracker.artifact("corpus", "corpus", [job.store.path / MANIFEST], aliases=[job.store.corpus])
    tracker.artifact("tokenizer", "tokenizer", run.path / "tokenizer", aliases=[job.tokenizer.fingerprint])
    return tracker


def bundle_input(meta: dict[str, Any]) -> Input:
    """A bundle as the artifact that its run handed on."""
    return Input(f"{meta.get('run', 'imported')}-bundle", "model", meta["weights_sha256"])


def write_bundle(job: Job, module: Training, measured: dict[str, float], run: Run, tracker: tracking.Tracker) -> None:
    """Hand on what was learnt; every process takes part in gathering it."""
    weights = checkpoint.whole_weights(module.model)
    if rank() != 0:
        return
    model = make_model(job.model.architecture, job.model.vocab_size)
    model.load_state_dict(weights)
    meta = bundle_meta(job.config, run, module.progress.step, measured)
    hand_over(Bundle(model, job.tokenizer, meta), run, tracker)


def hand_over(bundle: Bundle, run: Run, tracker: tracking.Tracker) -> None:
    """Save the bundle of a run, which completes it, and give it to W&B."""
    save_bundle(bundle, run.bundle)
    metrics = bundle.meta["metrics"]
    tracker.summary({f"final/{key}": value for key, value in metrics.items()})
    weights_hash = read_json(run.bundle / "meta.json")["weights_sha256"]
    tracker.artifact(f"{run.path.name}-bundle", "model", run.bundle, metrics, [weights_hash])


def early_bundle(run: Run, chosen: Checkpoint) -> Bundle:
    """What the bundle of a checkpoint is, but for the weights."""
    config = build(PretrainConfig, [run.path / "config.yaml"], {})
    tokenizer = Tokenizer.load(run.path / "tokenizer")
    model = start_model(config, named_start(config), tokenizer.vocab_size)
    measured = {} if chosen.score is None else {"val/loss": chosen.score}
    return Bundle(model, tokenizer, bundle_meta(config, run, chosen.step, measured))


def bundle_meta(config: PretrainConfig, run: Run, step: int, measured: dict[str, float]) -> dict[str, Any]:
    """Where a bundle comes from."""
    with described(run.path / "prepared.json", "put it back, or resume the run, which makes it again"):
        corpus = run.material["corpus"]
    return {
        "stage": "pretrain",
        "step": step,
        "corpus_fingerprint": corpus,
        "objective": config.objective.names(config.model.family),
        "config_fingerprint": fingerprint(asdict(config)),
        "parent": config.init_from,
        "run": run.path.name,
        "metrics": measured,
    }
