"""Fine-tuning with two processes does what one does, for every kind of task."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import cli
from tests.training.test_finetune import reviews, words, write_rows
from tests.training.test_finetune_retrieval import search_words, write_set
from tests.training.test_processes import Command, assert_same

EXACT: dict[str, Any] = {
    "model__dropout": 0,
    "head_dropout": 0,
    "optim__epsilon": 1e-4,
    "data__batch_size": 16,
    "data__micro_batch_size": 8,
    "trainer__max_epochs": 1,
    "trainer__max_steps": 9,
    "trainer__log_every": 1,
    "trainer__validate_every": 4,
    "trainer__validation_samples": 11,
}


def job(kind: str, folder: Path, run: Path, **more: Any) -> list[str]:
    if kind == "retrieval":
        return search_words(write_set(folder / "set"), run, model__family="encoder-decoder", **EXACT | more)
    if kind == "translation":
        table = [{"en": row["text"], "de": " ".join(reversed(row["text"].split()))} for row in reviews(72, 1)]
        more |= {"model__family": "encoder-decoder", "generation__max_new_tokens": 6}
    else:
        table = reviews(72, 1)
    write_rows(folder / "train.jsonl", table)
    write_rows(folder / "dev.jsonl", table[:13])
    return words(folder, run, kind, **EXACT | more)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sentiment", "translation", "retrieval"])
def test_two_processes_do_what_one_does(kind: str, tmp_path: Path) -> None:
    """An epoch's last batch leaves one process without rows; 11 rows to validate on are no multiple of anything."""
    torch.set_num_threads(1)
    assert cli.main(job(kind, tmp_path, tmp_path / "one")) == 0
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "WANDB"))}
    command = ["pipeline", *job(kind, tmp_path, tmp_path / "two", trainer__devices=2)]
    two = Command(command, tmp_path / "two.txt", environment | {"OMP_NUM_THREADS": "1"}).start()
    assert two.finish() == 0, two.printed
    assert_same(tmp_path / "one", tmp_path / "two")
