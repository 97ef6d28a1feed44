"""The house itself."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from pipeline import __version__, cli
from tests.novels import novel

PROJECT = Path(__file__).parent.parent


def test_tokenizers_is_the_library_and_our_folder_holds_data_only() -> None:
    assert tokenizers.__file__ is not None and hasattr(tokenizers, "Tokenizer")
    assert not Path(tokenizers.__file__).is_relative_to(PROJECT / "tokenizers")
    assert list((PROJECT / "tokenizers").rglob("*.py")) == []


def test_no_module_is_named_after_a_library_we_import() -> None:
    imported = {
        name
        for path in (PROJECT / "pipeline").rglob("*.py")
        for name in re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
    } - {"pipeline"}
    own = {path.stem for path in (PROJECT / "pipeline").rglob("*.py")}
    assert not imported & own


def test_the_package_can_be_read_in_a_day() -> None:
    """Fewer than 10,550 lines of code: what is left without blank lines, comments and docstrings."""
    lines = 0
    for path in (PROJECT / "pipeline").rglob("*.py"):
        tree = ast.parse(path.read_text())
        prose = {
            number
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            lines += bool(line.strip()) and not line.strip().startswith("#") and number not in prose
    assert lines < 10_550


def settings() -> dict[str, Any]:
    return tomllib.loads((PROJECT / "pyproject.toml").read_text())


def test_the_version_is_said_once_and_recorded() -> None:
    assert settings()["project"]["version"] == __version__


def test_every_folder_of_the_package_is_in_the_wheel() -> None:
    folders = {path.parent.relative_to(PROJECT) for path in (PROJECT / "pipeline").rglob("*.py")}
    listed = settings()["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted([".".join(folder.parts) for folder in folders] + ["pipeline.configs"])


def test_configs_are_found_from_any_folder_and_own_files_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["pretrain", "--config", "configs/model/mini.yaml", "--data.corpus", "x", "--print_config"]
    assert cli.main(words) == 0 and "size: mini" in capsys.readouterr().out
    (tmp_path / "configs" / "model").mkdir(parents=True)
    (tmp_path / "configs" / "model" / "mini.yaml").write_text("model:\n  size: tiny\n")
    assert cli.main(words) == 0 and "size: tiny" in capsys.readouterr().out
    assert cli.main(["pretrain", "--config", "configs/model/huge.yaml", "--data.corpus", "x"]) == 2
    assert capsys.readouterr().err == "error: configs/model/huge.yaml: no such config file\n"
    assert cli.main(["pretrain", "--config", "configs/pretrain/decodr.yaml", "--data.corpus", "x"]) == 2
    assert capsys.readouterr().err.endswith("decodr.yaml: no such config file; did you mean 'decoder'?\n")


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_folder(tmp_path: Path) -> None:
    """Built from a copy of the source, installed beside nothing, run where there is no clone."""
    source, empty, made = tmp_path / "source", tmp_path / "empty", tmp_path / "made"
    for folder in ("pipeline", "configs"):
        shutil.copytree(PROJECT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, source)
    empty.mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", source, "--no-deps", "--no-build-isolation", "-w", made], check=True, cwd=empty)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    wheel = next(made.glob("*.whl"))
    shipped = {path.relative_to(source).as_posix() for path in (source / "pipeline").rglob("*") if path.is_file()}
    assert shipped <= set(zipfile.ZipFile(wheel).namelist())
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True, cwd=empty)
    # The libraries are those of the tests; a folder of PYTHONPATH does not bring our own editable installation.
    libraries = {"PYTHONPATH": sysconfig.get_path("purelib"), "TRIPTYCH_CACHE": str(tmp_path / "cache")}

    def triptych(*words: str) -> str:
        command = [str(tmp_path / "venv" / "bin" / "triptych"), *words]
        done = subprocess.run(command, cwd=empty, env=os.environ | libraries, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert triptych("--version") == f"triptych {__version__}\n"
    for seed in range(3):
        (empty / f"{seed}.txt").write_text(novel(seed))
    config = ("--config", "configs/pretrain/encoder.yaml", "--config", "configs/model/tiny.yaml")
    quick = "--trainer.max_steps 2 --data.batch_size 2 --data.sequence_length 32 --model.width 32".split()
    more = "--data.new_tokenizer.vocab_size 400 --tracking.mode disabled --trainer.accelerator cpu".split()
    assert triptych("pretrain", *config, "--data.corpus", ".", *quick, *more, "--run_dir", "run") == "run/bundle\n"
