"""What benchmarks share: their arguments, processes that train in turn, a job to measure, and where numbers go."""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipeline.terminal import print_table

Step = Callable[[], object]


def arguments_of(name: str, text: str | None, data: bool = True) -> argparse.ArgumentParser:
    """A parser with the arguments that most benchmarks have."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if data:
        parser.add_argument("--data", default="novels-gutenberg", help="a folder of novels, or a set of the catalogue")
        parser.add_argument("--held_out", nargs="*", default=["carroll-alice"], help="books to validate on")
    parser.add_argument("--json", type=Path, default=Path(f"benchmarks/results/{name}.json"), help="the numbers")
    return parser


def small_job(arguments: argparse.Namespace, scratch: Path, **more: object) -> dict[str, str]:
    """Settings of `triptych pretrain` in the shape of benchmarks/training.py, as they are typed; `a__b` is `a.b`."""
    options: dict[str, object] = {
        "data.corpus": [arguments.data], "data.validation_books": arguments.held_out,
        "data.stores": str(scratch / "stores"), "data.new_tokenizer.vocab_size": 8192, "data.sequence_length": 256,
        "data.batch_size": 16, "model.size": "small", "tracking.mode": "disabled", "tracking.samples_every": 0,
    }  # fmt: skip
    options |= {key.replace("__", "."): value for key, value in more.items()}
    return {key: written(value) for key, value in options.items()}


def written(value: object) -> str:
    """A setting as it is typed."""
    return value if isinstance(value, str) else json.dumps(value)


def triptych(*words: str, **environment: str) -> None:
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "pipeline", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode:
        sys.exit(f"triptych {' '.join(words)}\n{done.stderr}")


def typed(options: dict[str, str]) -> list[str]:
    """Settings as words of a command."""
    return [word for key, value in options.items() for word in (f"--{key}", value)]


def save(path: Path, found: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")


def print_profile(what: str, job: Step, units: int = 1) -> None:
    """Where the time of a job goes, by torch's profiler: calls and milliseconds of each operation, by unit."""
    job()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        job()
    events = sorted(found.key_averages(), key=lambda event: event.self_cpu_time_total, reverse=True)
    total = sum(event.self_cpu_time_total for event in events)
    kept, others = events[:8], events[8:]
    rows = [(event.key, event.count / units, event.self_cpu_time_total) for event in kept]
    rows.append(("all others", sum(event.count for event in others) / units, total - sum(row[2] for row in rows)))
    columns = ("operation", "calls", "ms", "share")
    print_table(what, columns, [(name, calls, time / 1e3 / units, time / total) for name, calls, time in rows])


class Worker:
    """A process of its own that does a step when asked.

    `prepare` is called in it: it imports what it takes, which does not count as memory, and gives what makes the step.
    """

    def __init__(self, prepare: Callable[[], Callable[[], Step]]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, prepare), daemon=True)
        self.process.start()

    def ask(self) -> dict[str, float]:
        """Let it do a step: its seconds, and the most megabytes that training has taken so far."""
        self.pipe.send(None)
        answer: dict[str, float] = self.pipe.recv()
        return answer

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def serve(pipe: Any, prepare: Callable[[], Callable[[], Step]]) -> None:
    make = prepare()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest memory so far is forgotten
    step = make()
    while True:
        pipe.recv()
        began = time.perf_counter()
        step()
        pipe.send({"seconds": time.perf_counter() - began, "memory": (status("VmHWM") - before) / 1024})


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name)))


def in_turn(workers: dict[Any, Worker], rounds: int, warmup: int = 2) -> list[dict[Any, dict[str, float]]]:
    """What each answers, round by round, after rounds in which they warm up and compile."""
    try:
        return [{key: worker.ask() for key, worker in workers.items()} for _ in range(warmup + rounds)][warmup:]
    finally:
        for worker in workers.values():
            worker.stop()
