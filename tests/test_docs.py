"""The documentation: what it shows can be typed, what it names exists, and what is marked so runs in miniature."""

import ast
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from docs import reference
from pipeline import cli
from pipeline.configuration import build, to_yaml
from tests.novels import novel
from tests.training.jobs import SERVER
from tests.training.test_finetune import reviews, write_rows

PROJECT = Path(__file__).parent.parent
PAGES = [PROJECT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((PROJECT / "docs").glob("*.md"))
RUN = "<!-- run in miniature -->\n"
NEEDED = {"pretrain": {"data.corpus": "[x]"}, "finetune": {"task.name": "sentiment"}}

# What makes a command of the pages small enough for a test.
SMALL = (
    "--trainer.accelerator cpu --trainer.max_steps 3 --trainer.validation_samples 4 --tracking.mode disabled".split()
)
TINY = "--model.width 32 --model.layers 2 --data.batch_size 4 --data.sequence_length 32".split()
WORDS = "--data.new_tokenizer.vocab_size 400".split()
MINIATURE = {
    "pretrain": [*SMALL, *TINY, *WORDS, "--data.workers", "1"],
    "finetune": [*SMALL, *TINY, *WORDS],
    "tokenizer train": ["--vocab_size", "400"],
}


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    page: Path
    language: str
    text: str
    run: bool

    @property
    def lines(self) -> list[str]:
        return self.text.replace("\\\n", " ").splitlines()

    @property
    def commands(self) -> Iterator[list[str]]:
        """The words after `triptych` of each command, whatever starts it."""
        for line in self.lines:
            if typed := re.match(r"(?:\$ )?(?:(?:srun )?triptych|torchrun .* -m pipeline) (.*)", line):
                yield shlex.split(re.sub(r"\$[A-Z_]+", "2", typed[1]), comments=True)


def blocks() -> list[Block]:
    fenced = rf"^({RUN})?```(\w*)\n(.*?)^```"
    return [
        Block(page, language, text, bool(marked))
        for page in PAGES
        for marked, language, text in re.findall(fenced, page.read_text(), re.S | re.M)
    ]


SHELL = [block for block in blocks() if block.language in ("", "sh")]
MISTAKES = [block for block in SHELL if "\nerror: " in block.text]
PYTHON = [block for block in blocks() if block.language == "python"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the pages suppose their reader to have."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "my-novels").mkdir()
    for seed in range(3):
        (tmp_path / "my-novels" / f"{seed}.txt").write_text(novel(seed))
    (tmp_path / "my-reviews.jsonl").write_text('{"review": "fine", "stars": 4}\n')
    (tmp_path / "mine.yaml").write_text("")
    for name, seed in (("train", 1), ("dev", 2), ("test", 3)):
        write_rows(tmp_path / f"{name}.jsonl", reviews(24, seed))
    return tmp_path


def write_files(page: Path, folder: Path) -> None:
    """The files that a page tells its reader to write: blocks that begin with their name."""
    for block in blocks():
        named = re.match(r"# ([\w.-]+)\n", block.text)
        if named and block.page == page and block.language in ("yaml", "python"):
            (folder / named[1]).write_text(block.text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_can_be_typed(page: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(page, folder)
    typed = [block for block in SHELL if block.page == page and block not in MISTAKES]
    for words in [words for block in typed for words in block.commands]:
        if "--resume" in words:
            started = Path(words[words.index("--resume") + 1])
            started.mkdir(parents=True, exist_ok=True)
            config_class = cli.load(f"pipeline.{cli.COMMANDS[words[0]].config}")
            (started / "config.yaml").write_text(to_yaml(build(config_class, [], NEEDED[words[0]])))
        code = cli.main([*words, "--print_config"])
        assert code == 0, f"{page.name}: triptych {shlex.join(words)}: {capsys.readouterr().err}"


@pytest.mark.parametrize("block", MISTAKES, ids=lambda block: block.page.stem)
def test_mistakes_are_answered_as_the_pages_say(block: Block, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = [line for line in block.lines if line.startswith("error: ")]
    assert len(answers) == len(list(block.commands))
    for words, answer in zip(block.commands, answers, strict=True):
        assert cli.main(words) == 2
        assert capsys.readouterr().err.splitlines()[-1] == answer


@pytest.mark.parametrize("page", sorted({block.page for block in SHELL if block.run}), ids=lambda page: page.stem)
def test_marked_commands_run_in_miniature(page: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other in one folder, as a reader would type them."""
    write_files(page, folder)
    for block in (block for block in SHELL if block.page == page and block.run):
        for words in block.commands:
            name = " ".join(words[:2]) if " ".join(words[:2]) in cli.COMMANDS else words[0]
            code = cli.main([*words, *MINIATURE.get(name, [])])
            assert code == 0, f"triptych {shlex.join(words)}: {capsys.readouterr().err}"


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.page.stem)
def test_the_python_of_the_pages_runs(block: Block, folder: Path) -> None:
    (folder / "example.py").write_text(block.text)
    process = SERVER.Process(target=run_python, args=(folder,))
    process.start()
    process.join(120)
    printed = (folder / "printed.txt").read_text()
    assert process.exitcode == 0 and printed, printed


def run_python(folder: Path) -> None:
    """In a process of its own, which has imported the libraries before."""
    os.chdir(folder)
    os.environ |= {"TRIPTYCH_CACHE": str(folder / "cache"), "WANDB_MODE": "disabled"}
    printed = os.open("printed.txt", os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(printed, stream)
    runpy.run_path(str(folder / "example.py"), run_name="__main__")


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_test_that_is_named_exists() -> None:
    for page in PAGES:
        for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()):
            functions = [node.name for node in ast.parse((PROJECT / path).read_text()).body if hasattr(node, "name")]
            assert name in functions, f"{page.name}: {path}::{name}"


def test_the_reference_of_the_configuration_is_current() -> None:
    assert reference.PAGE.read_text() == reference.page(), "docs/configuration.md is out of date; run `make docs`"


def test_the_worked_examples_of_extending_work(tmp_path: Path) -> None:
    """The changes that docs/extending.md shows, made to a copy of the package, which then trains with them."""
    copy = tmp_path / "copy"
    shutil.copytree(PROJECT / "pipeline", copy / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    changes = [block for block in blocks() if block.language == "diff" and block.page.stem == "extending"]
    for block in changes:
        name, _, body = block.text.partition("\n")
        path = copy / name.removeprefix("# ")
        for hunk in body.split("\n\n"):
            lines = hunk.strip("\n").splitlines()
            before, after = ("".join(line[1:] + "\n" for line in lines if line[:1] != mark) for mark in "+-")
            assert path.read_text().count(before) == 1, f"{name}: not there, or not once:\n{before}"
            path.write_text(path.read_text().replace(before, after))
    assert changes
    (tmp_path / "novel.txt").write_text(novel(1))
    family = "--model.family encoder-decoder --objective.name reorder --model.position logarithmic".split()
    command = [sys.executable, "-m", "pipeline", "pretrain", "--data.corpus", "novel.txt", "--run_dir", "run"]
    done = subprocess.run(
        [*command, *family, *MINIATURE["pretrain"]],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(copy), "TRIPTYCH_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout == "run/bundle\n", done.stderr
