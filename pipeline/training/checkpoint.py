"""Checkpoints: all that a run needs to go on as if it had never stopped; complete, verified, or not there.

A checkpoint is a file of tensors and plain numbers and, written after it, a record with its checksum. It is the same
whether one process or many hold the weights, so that a run may go on with another number of them.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.optim import Optimizer

from pipeline.errors import UserError
from pipeline.files import file_hash, read_sealed, replacing, write_sealed
from pipeline.terminal import warn

FORMAT = 1
FOLDER = "checkpoints"
WHOLE = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    path: Path
    step: int
    score: float | None
    """What it was judged by, lower being better; None if it was not validated."""
    sha256: str
    regular: bool
    """Whether its time had come; one that a signal or a good score made does not count among those to keep."""

    @property
    def record(self) -> Path:
        return self.path.with_suffix(".json")

    def read(self) -> dict[str, Any]:
        """The state, checked to the last bit; tensors and plain types only."""
        if file_hash(self.path) != self.sha256:
            raise UserError(f"{self.path}: damaged, its checksum differs")
        try:
            return torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds for a file that is no checkpoint
            raise UserError(f"{self.path}: no checkpoint of tensors and plain numbers") from error


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """Weights by name, gathered from all processes; every process must call it."""
    return state_dict.get_model_state_dict(model, options=WHOLE)


def whole_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Weights and optimizer state by name, gathered from all processes; every process must call it."""
    weights = whole_weights(model)  # first: only then does the optimizer of fsdp know whose its numbers are
    return {"model": weights, "optimizer": state_dict.get_optimizer_state_dict(model, optimizer, options=WHOLE)}


def restore(state: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Put weights and optimizer state back, cut for as many processes as there are now."""
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    state_dict.set_model_state_dict(model, state["model"], options=WHOLE)
    state_dict.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=WHOLE)
    for group, asked in zip(optimizer.param_groups, settings, strict=True):
        group.update(asked)  # what was typed counts, not what was saved


def save(run: Path, state: dict[str, Any], step: int, score: float | None, regular: bool = True) -> None:
    """Write a checkpoint: the state first, then the record that vouches for it."""
    path = run / FOLDER / f"step-{step:08}.pt"
    with replacing(path) as temporary, temporary.open("wb") as opened:  # opened here: torch hides why it cannot write
        torch.save(state, opened)
    record = {"format": FORMAT, "step": step, "score": score, "sha256": file_hash(path), "regular": regular}
    write_sealed(path.with_suffix(".json"), record)


def found(run: Path) -> list[Checkpoint]:
    """The checkpoints of a run, the newest last."""
    checkpoints = []
    for record in sorted((run / FOLDER).glob("step-*.json")):
        try:
            told = read_sealed(record, "passed over")
            if told["format"] == FORMAT and record.with_suffix(".pt").is_file():
                score = None if told["score"] is None else float(told["score"])
                facts = (int(told["step"]), score, str(told["sha256"]), bool(told["regular"]))
                checkpoints.append(Checkpoint(record.with_suffix(".pt"), *facts))
        except (UserError, KeyError, TypeError, ValueError):
            warn(f"{record}: damaged, passed over")
    return checkpoints


def chosen(run: Path, step: int | None) -> Checkpoint:
    """The checkpoint of a step, or the newest."""
    there = {one.step: one for one in found(run)}
    if not there:
        raise UserError(f"{run}: no checkpoint in it; name the folder of a run that has saved one")
    if step is not None and step not in there:
        raise UserError(f"{run}: no checkpoint of step {step}; there are {', '.join(map(str, sorted(there)))}")
    return there[max(there) if step is None else step]


def newest(run: Path) -> tuple[Checkpoint, dict[str, Any]] | None:
    """The newest checkpoint that is whole, and its state; damaged ones are passed over with a line each."""
    for checkpoint in reversed(found(run)):
        try:
            return checkpoint, checkpoint.read()
        except UserError as error:
            warn(f"{error}; going back to the checkpoint before it")
    return None


def prune(run: Path, keep: int) -> None:
    """Delete all but the newest checkpoints and the best, and what interrupted saves left behind."""
    checkpoints = found(run)
    newest_ones = [*[checkpoint for checkpoint in checkpoints if checkpoint.regular][-keep:], *checkpoints[-1:]]
    judged = [checkpoint for checkpoint in checkpoints if checkpoint.score is not None]
    best = min(judged, key=lambda checkpoint: (checkpoint.score, checkpoint.step), default=None)
    for checkpoint in checkpoints:
        if checkpoint != best and checkpoint not in newest_ones:
            checkpoint.record.unlink(missing_ok=True)
            checkpoint.path.unlink(missing_ok=True)
    known = {path for checkpoint in found(run) for path in (checkpoint.path, checkpoint.record)}
    for path in (run / FOLDER).iterdir():
        if path not in known and re.fullmatch(r"\..*\.tmp|step-\d+\.pt", path.name):
            path.unlink(missing_ok=True)
