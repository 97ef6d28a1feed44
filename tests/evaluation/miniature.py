"""A study in miniature, in a process of its own that can be killed at any moment."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.training.jobs import SERVER, write_novels
from tests.training.test_finetune import reviews, write_rows
from tests.training.test_finetune_retrieval import write_set

COMMON = "trainer:\n  accelerator: cpu\n  validate_every: 5\ntracking:\n  mode: disabled\n"


def write_study(folder: Path) -> dict[str, Any]:
    """The files of a study of three families, a variant and a warm start, and the options to run it with."""
    novels = write_novels(folder / "novels")
    files = {"train": (160, 1), "validation": (40, 2), "test": (40, 3)}
    rows = "".join(f"  {name}: {write_rows(folder / f'{name}.jsonl', reviews(*of))}\n" for name, of in files.items())
    texts = [{"document": row["text"], "summary": row["text"].split()[0]} for row in reviews(80, 4)]
    write_rows(folder / "summaries.jsonl", texts)
    (folder / "pretrain.yaml").write_text(
        f"data:\n  corpus: [{novels}]\n  sequence_length: 32\n  batch_size: 8\n  workers: 1\n"
        f"  stores: {folder}/stores\n  new_tokenizer:\n    vocab_size: 400\n"
        f"model:\n  width: 32\n{COMMON}  samples_every: 0\n"
    )
    small = "  sequence_length: 24\n  batch_size: 16\noptim:\n  lr: 3.0e-3\n" + COMMON
    (folder / "sentiment.yaml").write_text(f"task:\n  name: sentiment\ndata:\n{rows}{small}")
    (folder / "summarization.yaml").write_text(
        f"task:\n  name: summarization\ngeneration:\n  max_new_tokens: 4\n"
        f"data:\n  train: {folder}/summaries.jsonl\n  target_length: 6\n{small}"
    )
    beir = write_set(folder / "beir")
    (folder / "retrieval.yaml").write_text(f"task:\n  name: retrieval\ndata:\n  train: {beir}\n{small}")
    tasks = [str(folder / f"{name}.yaml") for name in ("sentiment", "summarization", "retrieval")]
    return {
        "size": "tiny",
        "seeds": "2",
        "pretrain": json.dumps([str(folder / "pretrain.yaml")]),
        "pretrain_options": '{"trainer.max_steps": "4"}',
        "tasks": json.dumps(tasks),
        "skip": '["summarization", "retrieval"]',
        "task_options": '{"trainer.max_steps": "5"}',
        "run_dir": str(folder / "study"),
    }


def command(settings: dict[str, Any]) -> list[str]:
    return ["compare", *(word for key, value in settings.items() for word in (f"--{key}", value))]


def compare(words: Sequence[str], output: str) -> None:
    """A process that does a study; its jobs are done in it, and each is written down before it starts."""
    import torch

    from pipeline import cli
    from pipeline.evaluation import study

    torch.set_num_threads(1)
    with Path(output).open("a") as written:
        os.dup2(written.fileno(), 1)
        os.dup2(written.fileno(), 2)

    def run(job: Sequence[str], prepared: bool) -> int:
        with Path(output).with_suffix(".jobs").open("a") as done:
            done.write(job[job.index("--run_dir") + 1] + "\n")
        return cli.main(job)

    setattr(study, "run_command", run)  # noqa: B010
    sys.exit(cli.main(words))


def start(settings: dict[str, Any], output: Path) -> Any:
    process = SERVER.Process(target=compare, args=(command(settings), str(output)))
    process.start()
    return process


def jobs(output: Path) -> list[str]:
    """The folders of the jobs that were started."""
    path = output.with_suffix(".jobs")
    return path.read_text().split() if path.is_file() else []
