"""Real training jobs for the tests: small, in processes of their own that can be killed at any moment."""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.novels import novel

FAMILIES = {"encoder": "masked", "decoder": "causal", "encoder-decoder": "span"}
CLOCKED = ("seconds", "speed/")
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["pipeline.stages", "pipeline.training.pretraining", "tests.training.jobs"])


def write_novels(folder: Path, count: int = 4, paragraphs: int = 12) -> Path:
    """Made-up novels to train on."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(count):
        (folder / f"{seed}.txt").write_text(novel(seed, paragraphs))
    return folder


def arguments(novels: Path, run: Path, family: str = "decoder", **more: Any) -> list[str]:
    """The words of a small pretraining job; `__` in a name stands for a dot."""
    options: dict[str, Any] = {
        "data.corpus": novels,
        "data.new_tokenizer.vocab_size": 400,
        "data.stores": run.parent / "stores",
        "data.workers": 1,
        "data.sequence_length": 32,
        "data.batch_size": 8,
        "model.family": family,
        "model.size": "tiny",
        "model.width": 32,
        "model.dropout": 0.1,
        "trainer.max_steps": 24,
        "trainer.log_every": 3,
        "trainer.validate_every": 8,
        "trainer.validation_samples": 8,
        "trainer.save_every": 5,
        "trainer.accelerator": "cpu",
        "tracking.mode": "disabled",
        "tracking.samples_every": 12,
        "run_dir": run,
    } | {name.replace("__", "."): value for name, value in more.items()}
    return ["pretrain", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]


def main(words: Sequence[str], output: str) -> None:
    """A process that does one command."""
    import torch

    from pipeline import cli

    torch.set_num_threads(1)
    with Path(output).open("a") as written:
        os.dup2(written.fileno(), 1)
        os.dup2(written.fileno(), 2)
    sys.exit(cli.main(words))


def start(words: Sequence[str], output: Path) -> BaseProcess:
    """Start a command; what it prints is appended to a file."""
    process = SERVER.Process(target=main, args=(list(words), str(output)))
    process.start()
    return process


def finish(words: Sequence[str], output: Path, timeout: float = 120) -> int | None:
    """Run a command to its end and return its exit code."""
    process = start(words, output)
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(output.read_text())
    return process.exitcode


def signal_when(process: BaseProcess, condition: Callable[[], bool], number: int = signal.SIGKILL) -> int | None:
    """Send a signal as soon as a condition holds, wait, and return the exit code; nothing is sent if it ends before."""
    deadline = time.monotonic() + 120
    while process.is_alive() and not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    if process.is_alive() and process.pid:
        os.kill(process.pid, number)
    process.join(60)
    return process.exitcode


def rows(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run but for the clock."""
    read = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(CLOCKED)} for row in read]


def last_step(run: Path) -> int:
    """The newest step that a run has written metrics of."""
    try:
        return max((row["step"] for row in rows(run)), default=0)
    except (FileNotFoundError, ValueError):
        return 0
