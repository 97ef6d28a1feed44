"""What happens between steps: metrics, validation, checkpoints, samples, signals, the clock."""

import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from types import FrameType
from typing import Any

import pytorch_lightning as pl
import torch

from pipeline.evaluation.process import signals_to
from pipeline.model.products import linear
from pipeline.terminal import note, progress, warn
from pipeline.training import checkpoint
from pipeline.training.config import Precision
from pipeline.training.module import Progress, Training
from pipeline.training.optim import numbers_of, rate_share
from pipeline.training.run import Run
from pipeline.training.tracking import Tracker

Measure = Callable[[], dict[str, float]]
Routines = Sequence[tuple[int, Measure]]  # every so many steps, and at the end, by process 0; never if 0


class Keeper(pl.Callback):
    """Keeps a run: restores it, writes its metrics, validates, saves, and stops it in good order."""

    def __init__(
        self,
        run: Run,
        tracker: Tracker,
        validate: Measure,
        routines: Routines = (),
        judge: str = "val/loss",
        patience: int = 0,
    ) -> None:
        self.run, self.tracker = run, tracker
        self.state: dict[str, Any] | None = None
        """Of the checkpoint to go on from."""
        self.validate, self.routines = validate, routines
        self.judge, self.patience = judge, patience
        self.stopped_by: int | None = None
        self.validated_at = -1
        self.measured: dict[str, float] = {}
        """What the last validation found."""
        self.until_end = ExitStack()

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, Training)
        if self.state:
            checkpoint.restore(self.state, module.model, trainer.optimizers[0])
            if self.state["precision"]:  # nothing, where it was saved without a scaler of gradients
                trainer.precision_plugin.load_state_dict(self.state["precision"])
            module.progress = Progress(**self.state["progress"])
            self.state = None  # its memory is needed
        self.clock, self.peak = time.monotonic() - module.progress.seconds, 0.0
        self.logged = (module.progress.tokens, module.progress.flops, time.monotonic())
        bar = progress("training", module.total_steps, "steps")
        self.advance = self.until_end.enter_context(bar) if trainer.is_global_zero else lambda _: None
        self.advance(module.progress.step)

        def stop(number: int, _: FrameType | None) -> None:
            self.stopped_by = number
            module.told_to_stop = True
            signal.signal(signal.SIGINT, signal.default_int_handler)  # the second Ctrl-C stops at once

        self.until_end.enter_context(signals_to(stop))

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, number: int
    ) -> None:
        assert isinstance(module, Training)
        if (number + 1) % module.accumulation:
            return
        done, settings = module.progress, module.settings
        done.step += 1
        done.seconds = time.monotonic() - self.clock
        self.advance(1)
        late = settings.max_seconds is not None and done.seconds >= settings.max_seconds
        if trainer.world_size > 1 and settings.max_seconds is not None:
            late = bool(trainer.strategy.broadcast(late))
        last = late or done.step == module.total_steps
        if done.step % settings.log_every == 0 or last:
            self.write(trainer, done, self.train_metrics(trainer, module))
        if done.step % settings.validate_every == 0 or last:
            self.measured, self.validated_at = self.validate(), done.step
            score = self.score()
            done.stale = 0 if score < done.best else done.stale + 1
            done.best = min(done.best, score)
            last = last or bool(self.patience and done.stale >= self.patience)
            self.write(trainer, done, self.measured)
            if trainer.is_global_zero:
                words = ", ".join(f"{key} {value:.4f}" for key, value in self.measured.items())
                note(f"step {done.step:,}: {words}")
        done.ended = last
        alone = trainer.is_global_zero and not module.sharded  # a part of a model cannot write
        for every, routine in self.routines if alone else ():
            if every and (done.step % every == 0 or last):
                self.write(trainer, done, routine())
        is_best = self.validated_at == done.step and done.stale == 0
        regular = done.step % settings.save_every == 0 or last
        if regular or is_best or module.stopping:
            self.save(trainer, module, regular)
        trainer.should_stop = last or module.stopping

    def score(self) -> float:
        """What the last validation found, the lower the better."""
        value = self.measured[self.judge]
        return value if self.judge == "val/loss" else -value

    def train_metrics(self, trainer: pl.Trainer, module: Training) -> dict[str, float]:
        """What the steps since the last row were like."""
        done, now = module.progress, time.monotonic()
        tokens, flops, since = self.logged
        elapsed = max(now - since, 1e-9)
        self.logged = (done.tokens, done.flops, now)
        metrics = {
            "train/lr": module.optim.highest * rate_share(module.optim, done.step - 1, module.total_steps),
            "train/gradient_norm": done.gradient_norm,
            "train/skipped_steps": float(done.skipped),
            "speed/tokens_per_second": (done.tokens - tokens) / elapsed,
            "speed/mfu": (done.flops - flops) / elapsed / (self.peak_flops(module) * trainer.world_size),
            "speed/memory_gb": peak_memory(module.device),
        }
        if done.loss_count:
            metrics["train/loss"] = done.loss_sum / done.loss_count
        done.loss_sum, done.loss_count = 0.0, 0
        return {key: value for key, value in metrics.items() if math.isfinite(value)}

    def peak_flops(self, module: Training) -> float:
        """Of the numbers that the run computes with; says so where others would be faster."""
        if not self.peak:
            precision = module.settings.precision
            self.peak = measured_peak(module.device, precision)
            if precision != "32" and module.global_rank == 0 and measured_peak(module.device, "32") > self.peak:
                warn(f"trainer.precision: {precision} is slower than 32 on this processor; a new run can have that")
        return self.peak

    def write(self, trainer: pl.Trainer, done: Progress, metrics: dict[str, float]) -> None:
        if not trainer.is_global_zero or not metrics:
            return
        axes = {"tokens": done.tokens, "flops": done.flops, "seconds": round(done.seconds, 3)}
        counts = {"tokens_computed": done.tokens_computed, "tokens_loss": done.tokens_loss}
        row = axes | counts | metrics
        self.run.log({"step": done.step} | row)
        self.tracker.log(row, done.step)

    def save(self, trainer: pl.Trainer, module: Training, regular: bool) -> None:
        """Save a checkpoint; all processes gather, one writes."""
        state = checkpoint.whole_state(module.model, trainer.optimizers[0])
        if trainer.is_global_zero:
            done = module.progress
            score = self.score() if self.validated_at == done.step else None
            state |= {"progress": asdict(done), "precision": trainer.precision_plugin.state_dict()}
            checkpoint.save(self.run.path, state, done.step, score, regular)
            checkpoint.prune(self.run.path, module.settings.keep)
        trainer.strategy.barrier()

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.until_end.close()  # before Lightning gives signals back to whom they were; later it would get them again

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self.until_end.close()


def requeued(number: int | None) -> bool:
    """Ask the cluster to start this job again, if it is a job of SLURM's that was told to leave."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job or number in (None, signal.SIGINT) or not shutil.which("scontrol"):
        return False
    return subprocess.run(["scontrol", "requeue", job], check=False).returncode == 0


def measured_peak(device: torch.device, precision: Precision) -> float:
    """The floating-point operations a second that a large matrix product reaches on a device."""
    size = 4096 if device.type == "cuda" else 768
    matrix = torch.randn(size, size, device=device, dtype=numbers_of(device, precision))
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        float(linear(matrix, matrix)[0, 0])
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def peak_memory(device: torch.device) -> float:
    """The most memory used so far, in gigabytes: the device's, or the process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
