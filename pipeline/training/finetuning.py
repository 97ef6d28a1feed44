"""Fine-tuning: a model and rows of a task become a bundle that does it, and numbers that say how well."""

from collections import Counter
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.bundle import Bundle, save_bundle
from pipeline.data.tasks import TASKS, Row
from pipeline.evaluation.metrics import Score
from pipeline.files import read_json, write_json
from pipeline.terminal import note, print_table
from pipeline.training import checkpoint, tracking
from pipeline.training.config import FinetuneConfig
from pipeline.training.fit import fit
from pipeline.training.module import trained_numbers
from pipeline.training.pretraining import bundle_input
from pipeline.training.run import Run, opened, rank
from pipeline.training.taskjob import TaskJob, make_job

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
            judge = f"val/{TASKS[config.task.name].metric}"
            validate = partial(job.validate, module)
            fit(module, job.loader, run, tracker, validate, judge=judge, patience=config.patience)
            if rank() == 0:
                hand_on(job, run, tracker, module.progress.step)
            finished = True
        finally:
            tracker.finish(0 if finished else 1)
    return run.bundle


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
