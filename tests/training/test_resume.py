"""A run that is stopped, in whatever way and wherever, ends exactly as one that was not."""

import random
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli
from pipeline.files import MACHINE, read_json, write_sealed
from tests.training.jobs import FAMILIES, arguments, finish, last_step, rows, signal_when, start, write_novels


@pytest.fixture(scope="module")
def novels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_novels(tmp_path_factory.mktemp("corpus") / "novels")


def undisturbed(novels: Path, folder: Path, **more: Any) -> Path:
    run = folder / "undisturbed"
    assert finish(arguments(novels, run, **more), folder / "out.txt") == 0, (folder / "out.txt").read_text()
    return run


def same(one: Path, other: Path) -> bool:
    weights = [(run / "bundle" / "model.safetensors").read_bytes() for run in (one, other)]
    return weights[0] == weights[1] and rows(one) == rows(other)


def has_reached(run: Path, step: int) -> bool:
    return last_step(run) >= step


def kill_often(novels: Path, folder: Path, seed: int, kills: int, **more: Any) -> Path:
    """Kill a run a few times at random steps, once inside a save, and let it finish."""
    run, draw = folder / f"killed-{seed}", random.Random(seed)
    for number in range(kills):
        step = draw.randrange(1, 22)
        process = start(arguments(novels, run, **more), folder / "out.txt")
        if number == 0:  # while a checkpoint is being written
            signal_when(process, lambda: any((run / "checkpoints").glob(".*.tmp")))
        else:
            signal_when(process, partial(has_reached, run, step))
    assert finish(arguments(novels, run, **more), folder / "out.txt") == 0, (folder / "out.txt").read_text()
    return run


@pytest.mark.parametrize("family", FAMILIES)
def test_a_killed_run_ends_as_one_that_was_not(family: str, novels: Path, tmp_path: Path) -> None:
    """Dropout on, across epochs, killed at random steps and inside a save."""
    settings: dict[str, Any] = {"family": family, "data__micro_batch_size": 4}
    expected = undisturbed(novels, tmp_path, **settings)
    assert same(expected, kill_often(novels, tmp_path, 1, kills=3, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_twenty_times_with_two_workers(seed: int, novels: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"family": list(FAMILIES)[seed % 3], "data__loader_workers": 2}
    expected = undisturbed(novels, tmp_path, **settings)
    assert same(expected, kill_often(novels, tmp_path, seed, kills=3, **settings))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_no_worker_outlives_a_killed_run(novels: Path, tmp_path: Path) -> None:
    """Also where workers are not children of the run but of a server, which nobody would end."""
    run = tmp_path / "run"
    process = start(arguments(novels, run, data__loader_workers=2, trainer__max_steps=100_000), tmp_path / "out.txt")
    signal_when(process, lambda: last_step(run) >= 6 and len(workers(tmp_path)) == 2)
    assert process.exitcode == -signal.SIGKILL, "it never had two workers"
    deadline = time.monotonic() + 20
    while workers(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not workers(tmp_path)


def workers(folder: Path) -> list[Path]:
    """The processes that load batches, by the name that torch gives them, and print into a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "comm").read_text().startswith("pt_data_worker"):
                found += [process] if (process / "fd" / "1").readlink().is_relative_to(folder) else []
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_saves_and_leaves_with_75(number: int, novels: Path, tmp_path: Path) -> None:
    expected = undisturbed(novels, tmp_path)
    run, output = tmp_path / "run", tmp_path / "signalled.txt"
    process = start(arguments(novels, run), output)
    assert signal_when(process, lambda: last_step(run) >= 6, number) == 75, output.read_text()
    assert f"triptych pretrain --resume {run}" in output.read_text()
    assert finish(["pretrain", "--resume", str(run)], output) == 0, output.read_text()
    assert "going on from step" in output.read_text()
    assert same(expected, run)


def test_a_damaged_checkpoint_is_passed_over(novels: Path, tmp_path: Path) -> None:
    expected = undisturbed(novels, tmp_path)
    run, output = tmp_path / "run", tmp_path / "damaged.txt"
    signal_when(start(arguments(novels, run), output), lambda: last_step(run) >= 18)
    *_, older, newest = sorted((run / "checkpoints").glob("*.pt"))
    newest.write_bytes(newest.read_bytes()[:-1000])
    assert finish(arguments(novels, run), output) == 0
    assert f"{newest}: damaged" in output.read_text() and "going back" in output.read_text()
    assert f"going on from step {int(older.stem[5:])}" in output.read_text()
    assert same(expected, run)


def test_records_of_other_kinds_of_values_are_one_line(
    novels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever wrote them made the fingerprints agree."""
    run = undisturbed(novels, tmp_path)
    bundle = ["bundle", str(run), "--output", str(tmp_path / "bundle")]
    *_, newest = sorted((run / "checkpoints").glob("*.json"))
    wrong: Any
    for wrong in ([], "x"):
        write_sealed(newest, read_json(newest) | {"step": wrong})
        assert cli.main(bundle) == 0 and f"{newest}: damaged, passed over" in capsys.readouterr().err
    for material in ({"store": "x"}, {"store": None, "corpus": "x"}, {}):
        write_sealed(run / "prepared.json", material)
        assert cli.main(bundle) == 2
        assert capsys.readouterr().err.count(f"error: {run / 'prepared.json'}: damaged") == 1


def test_resuming_with_other_settings(novels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, output = tmp_path / "run", tmp_path / "out.txt"
    signal_when(start(arguments(novels, run), output), lambda: last_step(run) >= 6)
    assert cli.main(["pretrain", "--resume", str(run), "--model.width", "64"]) == 2
    assert "model.width 32 → 64" in capsys.readouterr().err
    assert cli.main(arguments(novels, run, optim__lr=0.5)) == 2
    assert "--resume" in capsys.readouterr().err
    assert cli.main(["pretrain", "--resume", str(run), "--trainer.max_steps", "3"]) == 2
    assert "trainer.max_steps: the run is at step" in capsys.readouterr().err
    more = ["--trainer.max_steps", "24", "--trainer.log_every", "6"]
    assert finish(["pretrain", "--resume", str(run), *more], output) == 0
    assert "trainer.log_every 3 → 6" in output.read_text()


def test_a_start_that_was_killed_before_it_had_a_config_goes_on(novels: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").touch()
    (run / f".config.yaml.{MACHINE}-999999999.tmp").touch()
    assert finish(arguments(novels, run, trainer__max_steps=2), tmp_path / "out.txt") == 0
    assert not list(run.rglob("*.tmp"))


def test_a_finished_run_is_left_alone(novels: Path, tmp_path: Path) -> None:
    run = undisturbed(novels, tmp_path)
    before = (run / "bundle" / "meta.json").stat().st_mtime_ns
    assert finish(arguments(novels, run), tmp_path / "again.txt") == 0
    assert "finished before" in (tmp_path / "again.txt").read_text()
    assert (run / "bundle" / "meta.json").stat().st_mtime_ns == before
