"""What a fine-tuning run hands on: its best weights measured beside a baseline, tables and pictures, and the bundle."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.bundle import Bundle, check_target, save_bundle
from pipeline.configuration import build
from pipeline.data.tasks import TASKS, Row
from pipeline.evaluation.attention_maps import attention_maps
from pipeline.evaluation.metrics import BY_LENGTH, Score, confusion
from pipeline.evaluation.pictures import draw_confusion
from pipeline.evaluation.ranking import BM25
from pipeline.files import write_text
from pipeline.model.recurrent import Recurrent
from pipeline.terminal import print_table
from pipeline.training import checkpoint, pretraining
from pipeline.training.checkpoint import Checkpoint
from pipeline.training.config import FinetuneConfig
from pipeline.training.pretraining import hand_over
from pipeline.training.run import Run
from pipeline.training.taskjob import TaskJob, make_job
from pipeline.training.tracking import Tracker

SHOWN = 10  # rows of a table of samples or mistakes
SHOWN_LETTERS = 24  # of the longest string whose attention is drawn
SAMPLE_HEADER = ("source", "expected", "predicted", "confidence")
BASELINES = {"summarization": "first sentence", "translation": "copy", "retrieval": "BM25"}


def hand_on(job: TaskJob, run: Run, tracker: Tracker, step: int) -> None:
    """Take the best weights, measure them, write predictions and the bundle."""
    job.model.load_state_dict(chosen_weights(job, run))
    if torch.cuda.is_available() and job.config.trainer.accelerator in ("auto", "gpu"):
        job.model.cuda()  # Lightning left it on the CPU
    metrics: dict[str, float] = {}
    baselines: dict[str, float] = {}
    signatures: dict[str, str] = {}
    table = []
    for split, rows in (("val", job.rows.validation), ("test", job.rows.test)):
        if rows:
            predictions = job.predictor.predict(rows)
            score = job.predictor.score(rows, predictions)
            metrics |= {f"{split}/{key}": value for key, value in score.metrics.items()}
            signatures |= score.signatures
            write_predictions(job, split, rows, predictions, score, run)
            beside = baseline(job, rows)
            baselines |= {f"{split}/{key}": value for key, value in (beside.metrics if beside else {}).items()}
            table.append((split, score, beside))
            show(job, split, rows, predictions, run, tracker, step)
    print_scores(job, table)
    if TASKS[job.config.task.name].generated:
        show_alignment(job, run, tracker, step)
    measured = {"metrics": metrics, "baselines": baselines, "signatures": signatures}
    hand_over(Bundle(job.model, job.start.tokenizer, bundle_meta(job, run) | measured), run, tracker)


def bundle_meta(job: TaskJob, run: Run) -> dict[str, Any]:
    """What a bundle must know to do its task, and where it comes from."""
    history = {key: job.start.meta[key] for key in ("objective", "corpus_fingerprint") if key in job.start.meta}
    return history | {
        "stage": "finetune",
        "task": asdict(job.config.task),
        "labels": job.encoder.labels,
        "pooling": job.pooling,
        "generation": asdict(job.config.generation),
        "source_length": job.encoder.source_length,
        "target_length": job.encoder.target_length,
        "rows_fingerprint": job.rows.fingerprint,
        "trained_on": job.config.data.train,
        "held_out": job.rows.held_out,
        "parent": job.config.init_from,
        "run": run.path.name,
    }


def bundle_of(run: Run, step: int | None, output: str | None) -> Path:
    """Make a bundle of a checkpoint, the newest or that of a step, without disturbing the run."""
    chosen = checkpoint.chosen(run.path, step)
    target = Path(output) if output else run.path / f"bundle-{chosen.step:08}"
    check_target(target, "run", run.path.name)
    bundle = (early_bundle if run.stage == "finetune" else pretraining.early_bundle)(run, chosen)
    bundle.model.load_state_dict(chosen.read()["model"])
    save_bundle(bundle, target)
    return target


def early_bundle(run: Run, chosen: Checkpoint) -> Bundle:
    """What the bundle of a checkpoint is, but for the weights."""
    job = make_job(build(FinetuneConfig, [run.path / "config.yaml"], {}), run)
    judge = f"val/{TASKS[job.config.task.name].metric}"
    measured = {"step": chosen.step, "metrics": {} if chosen.score is None else {judge: -chosen.score}}
    return Bundle(job.model, job.start.tokenizer, bundle_meta(job, run) | measured)


def chosen_weights(job: TaskJob, run: Run) -> dict[str, torch.Tensor]:
    """The weights of the best checkpoint, or the mean of the last few."""
    saved = checkpoint.found(run.path)
    if job.config.average > 1:
        regular = [one for one in saved if one.regular]  # as many as an undisturbed run has
        parts = [one.read()["model"] for one in regular[-job.config.average :]]
        return {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
    judged = [one for one in saved if one.score is not None] or saved
    best = min(judged, key=lambda one: (one.score if one.score is not None else 0.0, one.step))
    return best.read()["model"]


def baseline(job: TaskJob, rows: list[Row]) -> Score | None:
    """What doing next to nothing scores: the commonest class, the first sentence, a copy of the source, or BM25."""
    task = job.config.task.name
    if job.kind == "classification":
        commonest = Counter(row.label for row in job.rows.train).most_common(1)[0][0]
        sure = np.eye(len(job.encoder.labels))[job.encoder.labels.index(str(commonest))]
        return job.predictor.score(rows, [sure] * len(rows))
    if rows[0].documents:
        return job.predictor.score(rows, BM25(rows[0].documents).search([row.source for row in rows]))
    if task == "summarization":
        return job.predictor.score(rows, [row.source.strip().split("\n")[0].split(". ")[0] for row in rows])
    return job.predictor.score(rows, [row.source for row in rows]) if task == "translation" else None


def print_scores(job: TaskJob, table: list[tuple[str, Score, Score | None]]) -> None:
    """Print the metrics of each split with what next to nothing scores beside them; those by length as one table."""
    task = job.config.task.name
    for split, score, beside in table:
        header = ("metric", "this model", BASELINES.get(task, "commonest class"))[: 3 if beside else 2]
        whole = {key: value for key, value in score.metrics.items() if not key.startswith(BY_LENGTH)}
        rows = [(key, value, *([beside.metrics[key]] if beside else [])) for key, value in whole.items()]
        print_table(f"{task}, {split}", header, rows)
    if lengths := {key for _, score, _ in table for key in score.metrics if key.startswith(BY_LENGTH)}:
        header = ("length", *(f"{split} exact_match" for split, _, _ in table))
        by_length = [
            (int(key.removeprefix(BY_LENGTH)), *(score.metrics.get(key, "-") for _, score, _ in table))
            for key in lengths
        ]
        print_table(f"{task}, by length", header, sorted(by_length))


# --- Tables and pictures -----------------------------------------------------------------------------------------


def show(
    job: TaskJob, split: str, rows: list[Row], predictions: list[Any], run: Run, tracker: Tracker, step: int
) -> None:
    """Write samples, or of classes the surest mistakes and the confusion matrix, to files and to the tracker."""
    name, shown = ("mistakes", mistakes) if job.kind == "classification" else ("samples", answers)
    samples = shown(job, rows, predictions)[:SHOWN]
    header = SAMPLE_HEADER[: len(samples[0])] if samples else SAMPLE_HEADER
    lines = [json.dumps(dict(zip(header, sample, strict=True)), ensure_ascii=False) + "\n" for sample in samples]
    write_text(run.path / f"{split}-{name}.jsonl", "".join(lines))
    tracker.table(f"{split}/{name}", header, [(text[:500], *rest) for text, *rest in samples], step)
    if job.kind == "classification":
        labels = np.array([job.encoder.number(row.label or "") for row in rows])
        counts = confusion(np.argmax(predictions, 1), labels, len(job.encoder.labels))
        draw_confusion(counts, job.encoder.labels, run.path / f"{split}-confusion.png")
        tracker.image(f"{split}/confusion", run.path / f"{split}-confusion.png", step)


def mistakes(job: TaskJob, rows: list[Row], predictions: list[Any]) -> list[tuple[Any, ...]]:
    """The mistakes that a classifier was surest of."""
    labels = job.encoder.labels
    guesses = [(float(chances.max()), labels[int(chances.argmax())]) for chances in predictions]
    wrong = [(sure, row, guess) for row, (sure, guess) in zip(rows, guesses, strict=True) if guess != row.label]
    surest = sorted(wrong, key=lambda one: one[0], reverse=True)
    return [(row.source, row.label, guess, round(sure, 4)) for sure, row, guess in surest]


def answers(job: TaskJob, rows: list[Row], predictions: list[Any]) -> list[tuple[Any, ...]]:
    """For every row what was asked, what was expected, and what the model makes of it in words."""
    if job.kind == "classification":
        guesses = [job.encoder.labels[int(chances.argmax())] for chances in predictions]
        return [(row.source, row.label, guess) for row, guess in zip(rows, guesses, strict=True)]
    if job.kind == "text":
        return [(row.source, " | ".join(row.answers), text) for row, text in zip(rows, predictions, strict=True)]
    pairs = zip(rows, predictions, strict=True)
    named = [(row, row.documents.texts, ranking[0][0]) for row, ranking in pairs if row.documents]
    return [  # a document that answers the query, and the one ranked first
        (row.source, f"{row.target}: {texts.get(row.target or '', '')[:200]}", f"{best}: {texts[best][:200]}")
        for row, texts, best in named
    ]


def write_predictions(
    job: TaskJob, split: str, rows: list[Row], predictions: list[Any], score: Score, run: Run
) -> None:
    """Write a JSON row for every example: what it is, what was answered, and how good that is."""
    told = [dict(zip(SAMPLE_HEADER[:3], answer, strict=True)) for answer in answers(job, rows, predictions)]
    lines = [row | {"score": value} for row, value in zip(told, score.alone or score.examples, strict=True)]
    if score.alone:
        lines = [line | {"adds": value} for line, value in zip(lines, score.examples, strict=True)]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_text(run.path / f"{split}-predictions.jsonl", text)


def show_alignment(job: TaskJob, run: Run, tracker: Tracker, step: int) -> None:
    """Draw where the model looks while it writes the answer to a held-out string, if it looks anywhere."""
    if isinstance(job.model, Recurrent) and job.model.attention is None:
        return
    short = [row for row in job.rows.validation if len(row.source) <= SHOWN_LETTERS] or job.rows.validation
    example = job.encoder.example(max(short, key=lambda row: len(row.source)))
    source, target = (None if ids is None else ids.tolist() for ids in (example.source, example.inputs))
    tokenizer, folder = job.start.tokenizer, run.path / "attention"
    for path in attention_maps(job.model, tokenizer, source, target, folder, prefix=example.prefix):
        tracker.image(f"attention/{path.stem}", path, step)
