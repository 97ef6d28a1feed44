"""Fine-tuning: a model and rows of a task become a bundle that does it, and numbers that say how well."""

from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path

from pipeline.data.tasks import TASKS
from pipeline.terminal import note, warn
from pipeline.training import tracking
from pipeline.training.callbacks import Keeper
from pipeline.training.config import FinetuneConfig
from pipeline.training.fit import fit
from pipeline.training.module import trained_numbers
from pipeline.training.pretraining import bundle_input
from pipeline.training.results import hand_on
from pipeline.training.run import Run, opened, rank
from pipeline.training.taskjob import TaskJob, make_job


def finetune(config: FinetuneConfig) -> Path:
    """Do the whole job and return the bundle's folder; a run that was stopped goes on, a finished one is left alone."""
    with opened(config, f"finetune-{config.task.name}") as run:
        if run.finished:
            note(f"{run.path}: finished before")
            return run.bundle
        job = make_job(config, run)
        module = job.training()
        with start_tracking(job, run) as tracker:
            note_plan(job)
            judge = f"val/{TASKS[config.task.name].metric}"
            validate = partial(job.validate, module)
            fit(module, job.loader, Keeper(run, tracker, validate, judge=judge, patience=config.patience))
            if rank() == 0:
                hand_on(job, run, tracker, module.progress.step)
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
    if job.kind == "classification":
        counts = Counter(row.label for row in rows.train)
        note("classes: " + ", ".join(f"{label} {counts[label] / len(rows.train):.1%}" for label in job.encoder.labels))
    written, asked = job.config.generation.max_new_tokens, job.config.data.target_length
    if job.kind == "text" and written < asked:
        warn(f"answers end after generation.max_new_tokens, {written}, though data.target_length is {asked}; raise it")
    if (saves := -(-job.total_steps // job.config.trainer.save_every)) < job.config.average:
        warn(f"average: of {job.config.average} checkpoints there will be {saves}; lower trainer.save_every")
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
    return tracking.start(config.tracking, run.path, asdict(config), facts, inputs, enabled=rank() == 0)
