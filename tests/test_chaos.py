"""A short part of `make chaos`: what that looks for in hours, looked for in a minute."""

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from chaos import __main__ as harness
from chaos.attempt import attempt
from chaos.faults import try_faults
from chaos.inputs import try_inputs
from chaos.load import Watch, many_files, predictions, readers
from chaos.material import Material
from chaos.processes import PROJECT
from chaos.untrusted import try_rights, try_secrets, try_traps
from pipeline import cli


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Material]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TRIPTYCH_CACHE", "WANDB_MODE"):
            patch.setenv(name, "")  # so that what is set here ends with these tests
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield Material(tmp_path_factory.mktemp("chaos"))


def test_bad_input_is_used_or_refused_in_one_line(made: Material, tmp_path: Path) -> None:
    tallies = list(try_inputs(made, tmp_path, 150, seed=1))
    assert [tally.broken for tally in tallies if tally.broken] == []
    assert sum(tally.cases for tally in tallies) >= 150
    assert all(tally.refused for tally in tallies) and sum(tally.accepted for tally in tallies) > 20


def test_files_that_mean_harm_do_none(made: Material, tmp_path: Path) -> None:
    verdicts = list(try_traps(made, tmp_path / "traps"))
    assert len(verdicts) == 13 and [verdict for verdict in verdicts if verdict.wrong] == []


def test_secrets_stay_secret(made: Material, tmp_path: Path) -> None:
    assert [verdict for verdict in try_secrets(made, tmp_path / "secrets") if verdict.wrong] == []


def test_files_get_the_rights_of_the_umask(made: Material, tmp_path: Path) -> None:
    assert [verdict for verdict in try_rights(made, tmp_path / "rights", [0o027]) if verdict.wrong] == []


def test_a_full_disk_costs_no_more_than_what_was_being_written(made: Material, tmp_path: Path) -> None:
    (count,) = try_faults(made, tmp_path, times=1, seed=1, only="full disk in pretrain")
    assert count.times == 1 and count.lost == []


def test_many_files_rows_and_readers(made: Material, tmp_path: Path) -> None:
    for load, size in ((many_files, 60), (predictions, 1500), (readers, 2)):
        folder = tmp_path / load.__name__
        folder.mkdir()
        assert load(made, folder, size).wrong == ""


def test_the_harness_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback, an exit code without a reason, a message about the inside."""

    def told(message: str, code: int) -> None:
        monkeypatch.setattr(cli, "main", lambda _: sys.stderr.write(message) and code)

    told("error: 'NoneType' object is not iterable\n", 2)
    assert "inside" in attempt([]).wrong
    told("nothing\n", 2)
    assert "without one line" in attempt([]).wrong
    told("error: what, where, what to do\n", 2)
    assert attempt([]).wrong == ""
    told("!\n", 3)
    assert attempt([]).wrong == "exit code 3"
    monkeypatch.setattr(cli, "main", lambda _: 1 // 0)
    assert attempt([]).wrong.startswith("ZeroDivisionError")


def test_tables_replace_those_of_the_last_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "PROJECT", tmp_path)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    page = tmp_path / "benchmarks" / "RESULTS.md"
    page.write_text("Before\n<!-- made by make chaos -->\nold\n<!-- until here -->\nAfter\n")
    for table in ("first", "second"):
        harness.record_of("faults").write_text(json.dumps({"table": f"### {table}\n"}))
        harness.write_page()
    made = "<!-- made by make chaos -->\n\n### second\n\n<!-- until here -->"
    assert page.read_text() == f"Before\n{made}\nAfter\n"
    assert (PROJECT / "benchmarks" / "RESULTS.md").read_text().count(made.splitlines()[0]) == 1


def test_growing_memory_is_noticed() -> None:
    watch = Watch.__new__(Watch)
    watch.memory, watch.handles = [100.0 + number for number in range(200)], [10] * 200
    assert "memory grew" in watch.growth()
    watch.memory, watch.handles = [100.0] * 200, list(range(200))
    assert "open files grew" in watch.growth()
    watch.handles = [10] * 200
    assert watch.growth() == ""


def test_the_lock_has_every_package_with_a_hash_and_in_a_version_that_is_asked_for() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (PROJECT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    found = [re.fullmatch(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert all(found)
    locked = {match[1]: match[2] for match in found if match}
    asked = [*project["dependencies"], *project["optional-dependencies"]["huggingface"]]
    for requirement in map(Requirement, asked):
        assert requirement.specifier.contains(locked[requirement.name.lower()]), requirement
