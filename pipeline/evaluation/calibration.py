"""How long a study takes here: a few real steps of every model at its real shape, and a few real answers."""

import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from pipeline.bundle import make_model
from pipeline.data.batch import Batch
from pipeline.data.config import OBJECTIVES
from pipeline.data.objectives import IGNORED
from pipeline.evaluation.cell import Cell, grouped
from pipeline.evaluation.matching import lengths
from pipeline.evaluation.plan import read_base, vocabulary_size
from pipeline.evaluation.study import Study, disk_bytes
from pipeline.files import fingerprint
from pipeline.model.config import resolve
from pipeline.terminal import note, print_table, warn
from pipeline.training.config import FinetuneConfig, PretrainConfig
from pipeline.training.job import in_time, total_steps
from pipeline.training.module import Network, training_flops
from pipeline.training.optim import make_optimizer, numbers_of
from pipeline.training.run import Run
from pipeline.training.taskjob import make_job

STEPS = 3  # that are timed, after one that is not
ANSWERS = 16  # rows that are timed
START_SECONDS = 3  # before a job trains: settings, rows, tracking


@dataclass(frozen=True)
class Estimate:
    """What one job will take here."""

    steps: int
    tokens: int
    flops: float
    seconds: float


def print_estimate(study: Study) -> None:
    """Print what the jobs of each kind take here, and what the whole study does."""
    vocab_size = vocabulary_size(read_base(study.config, {}))
    rows: list[tuple[object, ...]] = []
    total = 0.0
    with TemporaryDirectory() as folder:
        for (job, name), cells in grouped(study.jobs()).items():
            note(f"timing {job} of {name}")
            found = estimate(cells[0], vocab_size, Path(folder))
            waiting = [cell for cell in cells if not cell.run.finished and study.is_mine(cell)]
            total += len(waiting) * found.seconds
            numbers = (found.steps, found.tokens, f"{found.flops:.2g}", in_time(found.seconds))
            rows.append((job, name, len(cells), len(waiting), *numbers, f"{disk_bytes(waiting) / 1e6:,.0f} MB"))
    header = ("job", "model", "runs", "to do", "steps", "raw tokens", "FLOPs", "time of one", "disk")
    print_table("What it takes here", header, rows)
    note(f"about {in_time(total)} in all, if nothing else runs on this machine")


def estimate(cell: Cell, vocab_size: int, folder: Path) -> Estimate:
    """Time a job; all models that learn from the same rows share a run, and so its tokenizer."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if isinstance(cell.config, PretrainConfig):
        return of_pretraining(cell.config, vocab_size, device)
    config = from_scratch(cell, cell.config, vocab_size)
    rows = fingerprint([asdict(config.task), asdict(config.data), config.seed])
    return of_task(config, Run(folder / rows), device)


def of_pretraining(config: PretrainConfig, vocab_size: int, device: torch.device) -> Estimate:
    """Of random tokens, which cost what real ones do; how many an epoch has is not known before the text is read."""
    model = make_model(resolve(config.model), vocab_size).to(device)
    objective = replace(config.objective, name=config.objective.name or OBJECTIVES[config.model.family][0])
    rows, window = config.data.batch_size, config.data.sequence_length
    source, target, predicted = lengths(model.architecture, window, objective)
    batch = random_batch(config.data.micro_batch_size or rows, source, target, predicted, vocab_size).to(device)
    parts = math.ceil(rows / len(batch.targets_BT))
    step = parts * seconds_of_step(Network(model), config, [batch] * (STEPS + 1))
    if config.trainer.max_epochs is not None:
        warn(f"the steps of {config.trainer.max_epochs:g} epochs are not known before the text is read: not counted")
    steps = total_steps(replace(config.trainer, max_epochs=None), 1, rows * window)
    flops = steps * parts * training_flops(model, batch)
    return Estimate(steps, steps * rows * window, flops, START_SECONDS + steps * step)


def random_batch(rows: int, source: int, target: int, predicted: int, vocab_size: int) -> Batch:
    """A batch of some lengths, in which so many first positions carry loss."""
    ids = torch.randint(vocab_size, (rows, max(source, target)))
    targets_BT = ids[:, : target or source].clone()
    targets_BT[:, predicted:] = IGNORED
    source_BS, inputs_BT = (ids[:, :count] if count else None for count in (source, target))
    counts: dict[str, Any] = {"tokens": 0, "samples": rows, "loss_positions": rows * predicted}
    return Batch(source_BS=source_BS, inputs_BT=inputs_BT, targets_BT=targets_BT, **counts)


def from_scratch(cell: Cell, config: FinetuneConfig, vocab_size: int) -> FinetuneConfig:
    """The same job without the pretraining that is not there yet."""
    if cell.parent is None:
        return config
    tokenizer = replace(config.data.new_tokenizer, vocab_size=vocab_size)
    return replace(config, model=cell.candidate.model, data=replace(config.data, new_tokenizer=tokenizer))


def of_task(config: FinetuneConfig, run: Run, device: torch.device) -> Estimate:
    """Of real rows: steps, validations in between, and the answers to all held-out rows at the end."""
    job = make_job(config, run)
    network = job.training().network.to(device)
    batches: list[Any] = [batch.to(device) for batch in islice(job.loader(0), STEPS + 1)]
    parts = job.share.accumulation(job.steps.batch_size)
    step = parts * seconds_of_step(network, config, batches)
    held_out, samples = job.rows.validation, config.trainer.validation_samples
    texts = list(held_out[0].documents.texts.values()) if held_out[0].documents else []
    few: Any = (texts or held_out)[:ANSWERS]
    begun = time.perf_counter()
    (job.predictor.embed if texts else job.predictor.predict)(few)
    answered = (time.perf_counter() - begun) / len(few)
    validations = math.ceil(job.total_steps / config.trainer.validate_every)
    answers = validations * min(samples or len(held_out), len(held_out)) + len(held_out) + len(job.rows.test)
    answers += len(texts) * (validations + 1 + bool(job.rows.test))  # which are embedded anew each time
    tokens = sum(example.tokens for example in job.examples.examples) * job.total_steps // job.steps.per_epoch
    flops = job.total_steps * parts * sum(training_flops(job.model, batch) for batch in batches) / len(batches)
    seconds = START_SECONDS + job.total_steps * step + answers * answered
    return Estimate(job.total_steps, tokens, flops, seconds)


def seconds_of_step(network: Network, config: PretrainConfig | FinetuneConfig, batches: Iterable[Batch]) -> float:
    """Forward, backward and update, the middle one of a few."""
    optimizer = make_optimizer(network.model, config.optim, config.trainer.precision)
    network.train()
    device, precision = next(network.parameters()).device, config.trainer.precision
    mixed = torch.autocast(device.type, numbers_of(device, precision), enabled=precision != "32")

    def step(batch: Batch) -> float:
        begun = time.perf_counter()
        with mixed:
            loss = network(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    seconds = [step(batch) for batch in batches]
    return float(np.median(seconds[1:] or seconds))
