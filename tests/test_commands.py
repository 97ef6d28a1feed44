"""Every command that needs a model, as a real process, one after the other as people type them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.jobs import arguments, write_novels
from tests.training.test_finetune import reviews, words, write_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    write_novels(folder / "novels")
    write_rows(folder / "train.jsonl", reviews(96, 1))
    write_rows(folder / "dev.jsonl", reviews(24, 2))
    return folder


def triptych(folder: Path, *arguments: str | Path, given: str = "", code: int = 0) -> str:
    """Run a command in a process of its own and return what it printed as its result."""
    own = {"OMP_NUM_THREADS": "1", "TRIPTYCH_CACHE": str(folder / "cache"), "WANDB_MODE": "disabled"}
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *map(str, arguments)],
        cwd=folder,
        env=os.environ | own,
        input=given,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_from_novels_to_predictions(folder: Path) -> None:
    run = folder / "decoder"
    bundle = triptych(folder, *arguments(folder / "novels", run, trainer__max_steps=6)).strip()
    assert bundle == f"{run}/bundle"
    assert triptych(folder, "generate", bundle, "The captain", "--max_new_tokens", "5").startswith("The captain")
    maps = triptych(folder, "attention", bundle, "The captain", "--output", "maps").splitlines()
    assert len(maps) == 2 and all((folder / name).read_bytes().startswith(b"\x89PNG") for name in maps)
    assert "finished" in triptych(folder, "runs", folder)
    other = triptych(folder, "bundle", run, "--step", "5", "--output", "fifth").strip()
    assert json.loads((folder / other / "meta.json").read_text())["step"] == 5
    tuned = folder / "tuned"
    command = words(folder, tuned, init_from=bundle, trainer__max_epochs=1)
    assert triptych(folder, *command).splitlines()[-1] == f"{tuned}/bundle"
    assert "accuracy" in triptych(folder, "evaluate", tuned / "bundle", "--data", folder / "dev.jsonl")
    told = triptych(folder, "predict", tuned / "bundle", given="a lovely film\n\na dull plot\n").splitlines()
    assert [json.loads(line)["source"] for line in told] == ["a lovely film", "a dull plot"]
    triptych(folder, "sync", run, code=2)
