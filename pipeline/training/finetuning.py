"""Fine-tuning: a model and rows of a task become a bundle that does it, and numbers that say how well."""

import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from pipeline.bundle import Bundle, Model, make_model, save_bundle
from pipeline.data.batch import collate
from pipeline.data.datamodule import Key, Share, Steps, TokenSteps, train_loader
from pipeline.data.objectives import Example
from pipeline.data.tasks import TASKS, Encoder, Row, Rows, read_task
from pipeline.errors import UserError
from pipeline.evaluation.metrics import Score
from pipeline.evaluation.predicting import Predictor
from pipeline.files import read_json, write_json
from pipeline.model.config import resolve
from pipeline.model.heads import ClassificationHead, Pooling
from pipeline.model.transformer import Transformer
from pipeline.terminal import note, print_table
from pipeline.tokenizer import Tokenizer, train
from pipeline.training import checkpoint, tracking
from pipeline.training.config import FinetuneConfig
from pipeline.training.fit import check_devices, fit
from pipeline.training.job import total_steps
from pipeline.training.module import Classifier, Network, Training, trained_numbers
from pipeline.training.pretraining import bundle_input, start_bundle
from pipeline.training.run import Run, opened, rank

EPOCHS = 3  # if no limit is set
# What a classifier can look at; the first state of a decoder has not read anything.
POOLINGS = {("encoder", "mean"), ("encoder", "class"), ("encoder", "last"), ("decoder", "mean"), ("decoder", "last")}
SHOWN = 10  # rows of a table of samples or mistakes


def finetune(config: FinetuneConfig) -> Path:
    """Do the whole job and return the bundle's folder; a run that was stopped goes on, a finished one is left alone."""
    with opened(config, f"finetune-{config.task.name}") as run:
        if run.finished:
            note(f"{run.path}: finished before")
            return run.bundle
        job = make_job(config, run)
        module = job.training()
        tracker = start_tracking(job, run)
        finished = False
        try:
            note_plan(job)
            task = TASKS[config.task.name]
            fit(
                module,
                job.loader,
                run,
                tracker,
                lambda: job.validate(module),
                (),
                f"val/{task.metric}",
                config.patience,
            )
            if rank() == 0:
                hand_on(job, run, tracker, module.progress.step)
            finished = True
        finally:
            tracker.finish(0 if finished else 1)
    return run.bundle


# --- Where it starts ---------------------------------------------------------------------------------------------


def starting_point(config: FinetuneConfig, rows: Rows, run: Run) -> Bundle:
    """The model and the tokenizer to start from: a bundle, two halves, or new ones."""
    if config.init_from is None:
        tokenizer = own_tokenizer(config, rows, run)
        torch.manual_seed(config.seed)
        return Bundle(make_model(resolve(config.model), tokenizer.vocab_size), tokenizer)
    bundle = start_bundle(config.init_from)
    if config.data.tokenizer and Tokenizer.load(config.data.tokenizer).fingerprint != bundle.tokenizer.fingerprint:
        raise UserError(f"data.tokenizer: not the tokenizer of {config.init_from}; leave it out")
    family = bundle.model.architecture.family
    if TASKS[config.task.name].kind == "text" and family == "encoder":
        torch.manual_seed(config.seed)
        second = start_bundle(config.init_decoder_from) if config.init_decoder_from else bundle
        return Bundle(warm_start(bundle, second), bundle.tokenizer, bundle.meta)
    if config.init_decoder_from:
        raise UserError(f"init_decoder_from: {config.init_from} is of family {family}; only an encoder takes a decoder")
    if family == "decoder" and "prefix" in bundle.meta.get("objective", []):
        both_ways = replace(bundle.model.architecture, prefix_attention="bidirectional")
        bundle.model.architecture = both_ways
    return bundle


def own_tokenizer(config: FinetuneConfig, rows: Rows, run: Run) -> Tokenizer:
    """The tokenizer that is named, or one trained on the training rows for this run."""
    if config.data.tokenizer:
        return Tokenizer.load(config.data.tokenizer)
    folder = run.path / "tokenizer"
    if rank() == 0 and not (folder / "meta.json").is_file():
        texts = (text for row in rows.train for text in (row.source, *row.answers))
        train(texts, config.data.new_tokenizer, rows.fingerprint).save(folder)
    while not (folder / "meta.json").is_file():
        time.sleep(0.2)
    return Tokenizer.load(folder)


def warm_start(first: Bundle, second: Bundle) -> Model:
    """An encoder-decoder of two pretrained halves; cross-attention, which neither has, starts anew."""
    if first.tokenizer.fingerprint != second.tokenizer.fingerprint:
        raise UserError(
            f"init_decoder_from: its tokenizer {second.tokenizer.fingerprint[:16]} is not that of init_from, "
            f"{first.tokenizer.fingerprint[:16]}; pretrain both with one tokenizer"
        )
    one, other = first.model.architecture, second.model.architecture
    if other.family == "encoder-decoder":
        raise UserError("init_decoder_from: takes an encoder or a decoder; name an encoder-decoder in init_from")
    layers = other.decoder_layers or other.encoder_layers
    settings = replace(one, family="encoder-decoder", decoder_layers=layers)
    if replace(other, family="encoder-decoder", encoder_layers=one.encoder_layers, decoder_layers=layers) != settings:
        raise UserError("init_decoder_from: the two models differ in more than their family; use one preset and size")
    model = make_model(settings, first.model.vocab_size)
    assert isinstance(model, Transformer) and model.decoder is not None
    weights = model.state_dict()
    taken = {name: tensor for name, tensor in first.model.state_dict().items() if not name.startswith("classifier")}
    side = "decoder" if other.decoder_layers else "encoder"
    for name, tensor in second.model.state_dict().items():
        if name.startswith(f"{side}."):
            taken["decoder." + name.removeprefix(f"{side}.")] = tensor
    model.load_state_dict(weights | taken)
    fresh = set(weights) - set(taken)
    assert fresh and all(".cross." in name for name in fresh), "something but cross-attention was not taken over"
    return model


# --- The job -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskExamples(Dataset[Example]):
    """The training rows as examples."""

    examples: list[Example]

    def __getitem__(self, key: Key) -> Example:
        return self.examples[key[2]]


@dataclass(frozen=True)
class TaskJob:
    """Everything that a fine-tuning run needs, made from its settings."""

    config: FinetuneConfig
    start: Bundle
    rows: Rows
    encoder: Encoder
    examples: TaskExamples
    steps: Steps | TokenSteps
    share: Share
    total_steps: int

    @property
    def model(self) -> Model:
        return self.start.model

    @cached_property
    def pad(self) -> int:
        return self.start.tokenizer.find("pad") or 0

    @property
    def classifies(self) -> bool:
        return TASKS[self.config.task.name].kind == "classification"

    @property
    def pooling(self) -> Pooling:
        """What the settings say, else the mean of an encoder's states or a decoder's last."""
        return self.config.pooling or ("mean" if self.model.architecture.family == "encoder" else "last")

    @property
    def predictor(self) -> Predictor:
        return Predictor(self.model, self.encoder, self.pooling, self.config.generation)

    def training(self) -> Training:
        """The LightningModule."""
        config, smoothing = self.config, self.config.task.label_smoothing
        network = Network(self.model, smoothing)
        if self.classifies:
            network = Classifier(self.model, self.pooling, smoothing, self.class_weights())
        for name, parameter in self.model.named_parameters():
            unused = self.classifies and name.startswith("head.") and parameter is not self.model.embedding.weight
            if unused or (config.freeze and not name.startswith("classifier")):
                parameter.requires_grad_(False)
        lengths = [int((example.targets >= 0).sum()) for example in self.examples.examples[:100]]
        return Training(
            network,
            config.optim,
            replace(config.trainer, keep=max(config.trainer.keep, config.average)),
            seed=config.seed,
            total_steps=self.total_steps,
            accumulation=self.share.accumulation(self.steps.batch_size),
            micro_batch=self.share.micro_batch,
            positions=max(1, int(np.mean(lengths))) * 32,
        )

    def class_weights(self) -> torch.Tensor | None:
        """Weights with which all classes count the same, if they should."""
        if not self.config.task.class_weights:
            return None
        counts = Counter(row.label for row in self.rows.train)
        sizes = torch.tensor([float(counts[label]) for label in self.encoder.labels]).clamp(min=1)
        return sizes.sum() / (len(sizes) * sizes)

    def loader(self, start: int) -> DataLoader[Example]:
        """Micro-batches of this process from a step on."""
        span = range(start, self.total_steps)
        return train_loader(self.examples, self.steps, self.share, span, self.pad, self.config.data.loader_workers)

    def validate(self, module: Training) -> dict[str, float]:
        """Loss and metrics on validation rows, spread evenly; every row once over all processes."""
        rows = spread(self.rows.validation, self.config.trainer.validation_samples)
        own = rows[self.share.rank :: self.share.processes]
        sums = np.zeros(2)
        module.network.eval()
        with torch.no_grad(), module.trainer.precision_plugin.forward_context():
            for start in range(0, len(own), 32):
                batch = collate([self.encoder.example(row) for row in own[start : start + 32]], self.pad)
                losses_P = module.network(batch.to(module.device), each=True)
                sums += (float(losses_P.cpu().double().sum()), len(losses_P))
            predictions = gathered(self.predictor.predict(own), self.share)
        module.network.train()
        loss, count = module.over_all_processes(sums)
        score = self.predictor.score(rows, predictions)
        return {"val/loss": loss / max(count, 1)} | {f"val/{key}": value for key, value in score.metrics.items()}


def gathered(own: list[Any], share: Share) -> list[Any]:
    """What all processes predicted, in the order of the rows."""
    if share.processes == 1:
        return own
    parts: list[Any] = [None] * share.processes
    torch.distributed.all_gather_object(parts, own)
    whole: list[Any] = [None] * sum(map(len, parts))
    for number, part in enumerate(parts):
        whole[number :: share.processes] = part
    return whole


def spread(rows: list[Row], count: int) -> list[Row]:
    """So many rows, evenly taken from all; 0 is all."""
    if not count or count >= len(rows):
        return rows
    return [rows[number] for number in np.linspace(0, len(rows) - 1, count).astype(int)]


def make_job(config: FinetuneConfig, run: Run) -> TaskJob:
    """Make everything that a run needs; mistakes show here, before anything is trained."""
    check_devices(config.trainer)
    if config.init_from is None:
        check_family(config, config.model.family)  # before anything is read
    rows = read_task(config.task, config.data, config.seed)
    data = config.data
    start = starting_point(config, rows, run)
    architecture = start.model.architecture
    check_family(config, architecture.family)
    labels = rows.labels
    if labels:
        torch.manual_seed(config.seed)
        start.model.classifier = ClassificationHead(architecture.width, len(labels), config.head_dropout)
    start.model.train()
    encoder = Encoder(config.task, architecture, start.tokenizer, labels, *lengths_within(config, start))
    examples = [encoder.example(row) for row in rows.train]
    steps: Steps | TokenSteps = Steps(len(examples), data.batch_size, config.seed)
    if data.batch_tokens:
        sizes = np.array([sum(len(ids) for ids in (one.source, one.inputs) if ids is not None) for one in examples])
        steps = TokenSteps(sizes, data.batch_tokens, config.seed)
    elif data.batch_size > len(examples):
        raise UserError(f"data.batch_size: {data.batch_size}, but there are only {len(examples)} training rows")
    own = -(-data.batch_size // config.trainer.processes)
    micro = 0 if data.batch_tokens else min(data.micro_batch_size or own, own)
    trainer = config.trainer
    if (trainer.max_steps, trainer.max_epochs, trainer.max_tokens) == (None, None, None):
        trainer = replace(trainer, max_epochs=EPOCHS)
    total = total_steps(trainer, steps.per_epoch, sum(example.tokens for example in examples))
    share = Share(rank(trainer.devices), trainer.processes, micro)
    if run.material.get("rows", rows.fingerprint) != rows.fingerprint:
        raise UserError(f"{run.path}: was started with other rows; restore them or choose another --run_dir")
    if rank() == 0:
        run.prepared(steps=total, rows=rows.fingerprint)
    return TaskJob(config, start, rows, encoder, TaskExamples(examples), steps, share, total)


def check_family(config: FinetuneConfig, family: str) -> None:
    """Refuse what a family cannot do, and pooling that would look at nothing."""
    task = TASKS[config.task.name]
    if family not in task.families:
        can = " or ".join(task.families)
        raise UserError(f"task.name: a model of family {family} cannot do {config.task.name}; use {can}")
    if config.pooling and (family, config.pooling) not in POOLINGS:
        raise UserError(f"pooling: {config.pooling} of a model of family {family} would not see the text; leave it out")


def lengths_within(config: FinetuneConfig, start: Bundle) -> tuple[int, int]:
    """The most tokens of a source and a target: what is asked for, if the model has so many positions."""
    source, target, model = config.data.sequence_length, config.data.target_length, start.model.architecture
    written = 0 if TASKS[config.task.name].kind == "classification" else max(target, config.generation.max_new_tokens)
    if model.position != "learned" and model.attention != "low_rank":
        return source, target
    needed = source + written + 3 if model.family == "decoder" else max(source + 2, written + 2)
    if needed > model.max_positions:
        raise UserError(
            f"data.sequence_length: {source} and a target of {written} need {needed} positions, but the model has "
            f"{model.max_positions}; shorten them"
        )
    return source, target


def note_plan(job: TaskJob) -> None:
    """Say what is about to be done, and what had to be cut."""
    if rank() != 0:
        return
    rows, cut = job.rows, job.encoder.cut
    numbers = sum(parameter.numel() for parameter in job.model.parameters())
    start = job.config.init_from or "scratch"
    note(
        f"{job.config.task.name}, {job.model.architecture.family} of {numbers:,} parameters from {start}: "
        f"{len(rows.train):,} rows, {len(rows.validation):,} for validation, {len(rows.test):,} for test; "
        f"{job.total_steps:,} steps ({job.total_steps / job.steps.per_epoch:.1f} epochs)"
    )
    if job.classifies:
        counts = Counter(row.label for row in rows.train)
        note("classes: " + ", ".join(f"{label} {counts[label] / len(rows.train):.1%}" for label in job.encoder.labels))
    for role, count in cut.items():
        if count:
            note(f"{count:,} of {len(rows.train):,} {role}s were cut to the longest allowed")


def start_tracking(job: TaskJob, run: Run) -> tracking.Tracker:
    """Begin to track, in process 0 alone."""
    config, architecture = job.config, job.model.architecture
    facts = {
        "stage": "finetune",
        "task": config.task.name,
        "family": architecture.family,
        "parameters": trained_numbers(job.model),
        "seed": config.seed,
        "dataset": config.data.train or config.task.name,
        "pretrained": config.init_from is not None,
    }
    inputs = [bundle_input(job.start.meta)] if "weights_sha256" in job.start.meta else []
    return tracking.start(
        config.tracking,
        run.path,
        job="finetune",
        name=run.path.name,
        settings=asdict(config),
        facts=facts,
        inputs=inputs,
        enabled=rank() == 0,
    )


# --- What is handed on -------------------------------------------------------------------------------------------


def hand_on(job: TaskJob, run: Run, tracker: tracking.Tracker, step: int) -> None:
    """Take the best weights, measure them, write predictions and the bundle."""
    job.model.load_state_dict(chosen_weights(job, run))
    if torch.cuda.is_available() and job.config.trainer.accelerator in ("auto", "gpu"):
        job.model.cuda()  # Lightning left it on the CPU
    metrics: dict[str, float] = {}
    signatures: dict[str, str] = {}
    table = []
    for split, rows in (("val", job.rows.validation), ("test", job.rows.test)):
        if rows and not (split == "test" and job.classifies and rows[0].label is None):
            predictions = job.predictor.predict(rows)
            score = job.predictor.score(rows, predictions)
            metrics |= {f"{split}/{key}": value for key, value in score.metrics.items()}
            signatures |= score.signatures
            write_json(run.path / f"{split}-scores.json", score.examples)
            table.append((split, score, baseline(job, rows)))
            tracker.table(f"{split}/samples", ("source", "expected", "predicted"), shown(job, rows, predictions), step)
    print_scores(job, table)
    meta = {
        "stage": "finetune",
        "task": asdict(job.config.task),
        "labels": job.encoder.labels,
        "pooling": job.pooling,
        "generation": asdict(job.config.generation),
        "source_length": job.encoder.source_length,
        "target_length": job.encoder.target_length,
        "rows_fingerprint": job.rows.fingerprint,
        "parent": job.config.init_from,
        "run": run.path.name,
        "metrics": metrics,
        "signatures": signatures,
    }
    history = {key: job.start.meta[key] for key in ("objective", "corpus_fingerprint") if key in job.start.meta}
    save_bundle(Bundle(job.model, job.start.tokenizer, history | meta), run.bundle)
    tracker.summary({f"final/{key}": value for key, value in metrics.items()})
    weights_hash = read_json(run.bundle / "meta.json")["weights_sha256"]
    tracker.artifact(f"{run.path.name}-bundle", "model", run.bundle, metrics, [weights_hash])


def chosen_weights(job: TaskJob, run: Run) -> dict[str, torch.Tensor]:
    """The weights of the best checkpoint, or the mean of the last few."""
    saved = checkpoint.found(run.path)
    if job.config.average > 1:
        regular = [one for one in saved if one.regular]  # as many as an undisturbed run has
        parts = [one.read()["model"] for one in regular[-job.config.average :]]
        return {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
    judged = [one for one in saved if one.score is not None] or saved
    best = min(judged, key=lambda one: (one.score if one.score is not None else 0.0, one.step))
    weights: dict[str, torch.Tensor] = best.read()["model"]
    return weights


def baseline(job: TaskJob, rows: list[Row]) -> Score | None:
    """What doing next to nothing scores: the commonest class, the first sentence, or a copy of the source."""
    task = job.config.task.name
    if job.classifies:
        commonest = Counter(row.label for row in job.rows.train).most_common(1)[0][0]
        sure = np.eye(len(job.encoder.labels))[job.encoder.labels.index(str(commonest))]
        return job.predictor.score(rows, [sure] * len(rows))
    if task == "summarization":
        return job.predictor.score(rows, [row.source.strip().split("\n")[0].split(". ")[0] for row in rows])
    return job.predictor.score(rows, [row.source for row in rows]) if task == "translation" else None


def print_scores(job: TaskJob, table: list[tuple[str, Score, Score | None]]) -> None:
    """Print the metrics of each split with what next to nothing scores beside them."""
    name = {"summarization": "first sentence", "translation": "copy"}.get(job.config.task.name, "commonest class")
    for split, score, beside in table:
        header = ("metric", "this model", name)[: 3 if beside else 2]
        rows = [(key, value, *([beside.metrics[key]] if beside else [])) for key, value in score.metrics.items()]
        print_table(f"{job.config.task.name}, {split}", header, rows)


def shown(job: TaskJob, rows: list[Row], predictions: list[Any]) -> list[tuple[str, str, str]]:
    """Samples of texts, or of classes the mistakes that it was surest of."""
    if not job.classifies:
        pairs = islice(zip(rows, predictions, strict=True), SHOWN)
        return [(row.source[:500], " | ".join(row.answers), str(text)) for row, text in pairs]
    labels = job.encoder.labels
    wrong = [
        (float(chances.max()), row.source[:500], str(row.label), labels[int(chances.argmax())])
        for row, chances in zip(rows, predictions, strict=True)
        if labels[int(chances.argmax())] != row.label
    ]
    surest = sorted(wrong, reverse=True)[:SHOWN]
    return [(source, label, f"{guess} ({sure:.0%})") for sure, source, label, guess in surest]
