"""How fast a whole pretraining job is, beside transformers' Trainer and beside our bare steps.

    python -m benchmarks.endtoend --data NOVELS --rounds 5 --steps 200

The shape of benchmarks/training.py: a decoder of ours, GPT-2 of transformers, no dropout, AdamW, 16 windows of 256
tokens from one store. Each job is a process of its own, in turn; tokens per second from the third step to the last,
with loader, clipping and metrics; ours has a row of metrics every step and tracks with W&B (offline), the Trainer logs
every 10 steps and compiles its model if a quarter of the steps, tried first, is then faster. The bare steps have a
batch in memory, and no loader, clipping or metrics.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments_of, save, small_job, triptych, typed
from pipeline.configuration import build
from pipeline.data.batch import Batch
from pipeline.files import read_json
from pipeline.terminal import note, print_table
from pipeline.training.config import PretrainConfig
from pipeline.training.job import Job
from pipeline.training.pretraining import make_job
from pipeline.training.run import Run, opened

OPTIONS = "options.json"
SKIPPED = 2  # steps that warm up


def main() -> None:
    parser = arguments_of("endtoend", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="of each job in each round")
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        kind, folder = arguments.job
        print(json.dumps(JOBS[kind](Path(folder), arguments.steps)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        words = small_job(
            arguments, Path(scratch), model__family="decoder", trainer__max_steps=arguments.steps,
            trainer__save_every=arguments.steps, trainer__validate_every=arguments.steps,
            trainer__validation_samples=16, trainer__log_every=1, tracking__mode="offline",
        )  # fmt: skip
        (Path(scratch) / OPTIONS).write_text(json.dumps(words))
        job, _ = material(Path(scratch), 1)  # the tokenizer and the store are there for all
        job.tokenizer.save(Path(scratch) / "tokenizer")
        words["data.tokenizer"] = f"{scratch}/tokenizer"
        (Path(scratch) / OPTIONS).write_text(json.dumps(words))
        tried = {kind: measured(kind, max(arguments.steps // 4, SKIPPED + 1), scratch) for kind in TRAINERS}
        slower = min(tried, key=tried.__getitem__)
        speeds: dict[str, list[float]] = {kind: [] for kind in JOBS if kind != slower}
        for turn in range(arguments.rounds):
            for kind, found in speeds.items():
                found.append(measured(kind, arguments.steps, scratch))
                note(f"round {turn + 1}, {kind}: {found[-1]:,.0f} tokens/s")
            save(arguments.json, {"steps": arguments.steps, "rows": rows_of(speeds)})  # after each round
    header = ("what", "tokens/s", "least", "most", "ours beside it", "least", "most")
    print_table(f"{arguments.rounds} × {arguments.steps} steps", header, rows_of(speeds))


def measured(kind: str, steps: int, scratch: str) -> float:
    """The tokens a second of a job in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.endtoend", "--steps", str(steps), "--job", kind, scratch]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


def rows_of(speeds: dict[str, list[float]]) -> list[tuple[object, ...]]:
    ours = speeds["triptych pretrain"]
    return [
        (kind, statistics.median(found), min(found), max(found), *ratio(ours, found))
        for kind, found in speeds.items()
    ]  # fmt: skip


def ratio(ours: list[float], other: list[float]) -> tuple[float, float, float]:
    """The median of the ratios of each round, the least and the most."""
    ratios = [one / two for one, two in zip(ours, other, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


# --- Jobs --------------------------------------------------------------------------------------------------------


def our_job(folder: Path, steps: int) -> float:
    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    triptych("pretrain", *typed(read_json(folder / OPTIONS) | {"run_dir": str(run)}))
    rows = [row for row in Run(run).rows() if "train/loss" in row]
    first, last = rows[SKIPPED - 1], rows[-1]
    return float((last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"]))


def bare_job(folder: Path, steps: int) -> float:
    from benchmarks.training import make_step
    from pipeline.training.module import Network

    job, batches = material(folder, 1)
    step = make_step(Network(job.model), batches[0], compiled=False)  # all batches have one shape
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return batches[0].tokens * (steps - SKIPPED) / sum(seconds[SKIPPED:])


def their_job(folder: Path, steps: int, compiled: bool = False) -> float:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from benchmarks.training import hugging_face

    _, batches = material(folder, steps)
    assert all(batch.inputs_BT is not None for batch in batches)
    rows = [{"input_ids": row, "labels": row} for batch in batches for row in batch.inputs_BT]  # type: ignore[union-attr]
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    settings = TrainingArguments(
        output_dir=str(folder / "trainer"), per_device_train_batch_size=16, max_steps=steps, logging_steps=10,
        save_steps=steps, learning_rate=1e-3, report_to="none", use_cpu=True, disable_tqdm=True,
        optim="adamw_torch_fused", torch_compile=compiled,
    )  # fmt: skip
    Trainer(hugging_face("GPT-2", 0.0).model, settings, train_dataset=rows, callbacks=[Clock()]).train()  # type: ignore[arg-type]
    tokens = 16 * 256 * (len(times) - SKIPPED)
    return tokens / (times[-1] - times[SKIPPED - 1])


def material(folder: Path, steps: int) -> tuple[Job, list[Batch]]:
    """Our job, and its first batches."""
    options = read_json(folder / OPTIONS) | {"run_dir": tempfile.mkdtemp(dir=folder) + "/run"}
    config = build(PretrainConfig, [], options)
    with opened(config, "peer") as run:
        job = make_job(config, run)
    return job, list(islice(job.loader(0), steps))


Work = Callable[[Path, int], float]
TRAINERS: dict[str, Work] = {
    "transformers' Trainer": their_job,
    "transformers' Trainer, compiled": partial(their_job, compiled=True),
}
JOBS: dict[str, Work] = {"triptych pretrain": our_job, "our bare steps": bare_job, **TRAINERS}

if __name__ == "__main__":
    main()
