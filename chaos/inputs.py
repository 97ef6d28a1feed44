"""Bad input: thousands of wrong settings, texts, rows and damaged files through the command line, in this process.

Whatever it is given, a command ends well or refuses in one line with exit code 2; never a traceback or a hang.
"""

import contextlib
import csv
import functools
import gzip
import io
import json
import math
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import yaml
from hypothesis import strategies as st

from chaos.attempt import Outcome, attempt, memory_limit
from chaos.damage import DAMAGES, damage, try_damage
from chaos.material import Material, finetune_words, nested
from chaos.oddities import CONTENTS, FLOATS, HUGE, HURTING, ODD, SUFFIXES, VALUES
from chaos.processes import PROJECT
from pipeline import cli, configuration
from pipeline.configuration import choices, fields_of
from tests.training.jobs import arguments


@dataclass
class Tally:
    """What became of the cases of one kind."""

    name: str
    cases: int = 0
    accepted: int = 0
    refused: int = 0
    broken: dict[str, tuple[int, str]] = field(default_factory=dict)
    """What went wrong: how often, and the shortest case that shows it."""

    def count(self, outcome: Outcome, case: str) -> None:
        self.cases += 1
        if outcome.wrong:
            times, shortest = self.broken.get(outcome.wrong, (0, case))
            self.broken[outcome.wrong] = (times + 1, min(shortest, case, key=len))
        else:
            self.accepted += outcome.code == 0
            self.refused += outcome.code == 2


def try_inputs(made: Material, folder: Path, total: int, seed: int) -> Iterator[Tally]:
    """Try `total` cases, of each kind as many as its share says."""
    parser, configuration.make_parser = configuration.make_parser, functools.cache(configuration.make_parser)
    for name, (share, strategy, trial) in KINDS.items():
        tally, count = Tally(name), math.ceil(total * share)
        while tally.cases < count:  # a strategy may run out of what is new to it
            with memory_limit():
                try_some(strategy, functools.partial(trial, made, folder / "case"), tally, count, seed)
        for wrong, (times, shortest) in tally.broken.items():
            sys.stderr.write(f"{name}: {times} × {wrong}\n    {shortest:.1500}\n")
        yield tally
    configuration.make_parser = parser


def try_some(cases: st.SearchStrategy[Any], trial: functools.partial[Any], tally: Tally, count: int, seed: int) -> None:
    @hypothesis.seed(seed + tally.cases)
    @hypothesis.settings(
        max_examples=count - tally.cases,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(cases)
    def case(drawn: Any) -> None:
        folder = trial.args[1]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        tally.count(*trial(drawn))

    case()


Trial = Callable[[Material, Path, Any], tuple[Outcome, str]]
"""Try one case in an empty folder: what became of it, and the case in words."""


# --- Settings ----------------------------------------------------------------------------------------------------

NEEDED: dict[str, dict[str, str]] = {
    "pretrain": {"data.corpus": "x"}, "finetune": {"task.name": "sentiment"}, "compare": {"tasks": "x.yaml"},
    "prepare": {"corpus": "x", "tokenizer": "t", "output": "o"}, "tokenizer train": {"corpus": "x", "output": "o"},
}  # fmt: skip
# Other machines, devices and networks; or the time and the folders of the case itself.
NOT_TRIED = set(
    "accelerator num_nodes devices strategy extra compile max_steps max_epochs max_tokens max_seconds tracking seeds "
    "run_dir resume loader_workers workers stores dry_run".split()
)


def fields(name: str) -> dict[str, Any]:
    return fields_of(cli.load(f"pipeline.{cli.COMMANDS[name].config}"))


@st.composite
def settings_cases(draw: st.DrawFn) -> tuple[str, dict[str, Any], bool]:
    """A command, up to three of its fields with a value each, and whether they are typed or stand in a file."""
    name = draw(st.sampled_from(sorted(cli.COMMANDS)))
    keys = draw(st.lists(st.sampled_from(sorted(fields(name)) or ["config"]), min_size=1, max_size=3))
    known = {key: st.sampled_from(choices(fields(name).get(key)) or ODD) for key in keys}
    return name, {key: draw(VALUES | known[key]) for key in keys}, draw(st.booleans())


def try_settings(made: Material, folder: Path, case: tuple[str, dict[str, Any], bool]) -> tuple[Outcome, str]:
    """Parse them; what is accepted must come back the same from the YAML that it is saved as."""
    name, values, in_file = case
    words = [*name.split(), *typed(NEEDED.get(name, {})), *([] if in_file else typed(values))]
    if in_file:
        (folder / "case.yaml").write_text(yaml.dump(nested(values)), encoding="utf-8", errors="replace")
        words.append(f"--config={folder / 'case.yaml'}")
    outcome = attempt([*words, "--print_config"])
    if outcome.code == 0 and not outcome.wrong:
        (folder / "printed.yaml").write_text(outcome.output)
        again = attempt([*name.split(), f"--config={folder / 'printed.yaml'}", "--print_config"])
        if again.output != outcome.output:
            outcome = Outcome(0, "", "", f"not the same when read again ({name})")
    return outcome, f"{words} {values}"


def typed(values: dict[str, Any]) -> list[str]:
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()]


@st.composite
def job_cases(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Settings that a small job is then really tried with, where it accepts them."""
    name = draw(st.sampled_from(["pretrain", "finetune"]))
    tried = [key for key in sorted(fields(name)) if not NOT_TRIED.intersection(key.split("."))]
    keys = draw(st.lists(st.sampled_from(tried), min_size=1, max_size=2, unique=True))
    return name, {key: draw(st.sampled_from([*choices(fields(name)[key]), *HUGE, "true", "false"])) for key in keys}


def try_job(made: Material, folder: Path, case: tuple[str, dict[str, Any]]) -> tuple[Outcome, str]:
    name, values = case
    words = [*arguments(made.novels, folder / "run"), "--dry_run"]
    if name == "finetune":
        words = finetune_words(made.rows, folder / "run", trainer__max_steps=1, task__examples=40)
    with contextlib.chdir(folder):
        return attempt([*words, *typed(values)]), f"{name} {typed(values)}"


def try_file(made: Material, folder: Path, content: bytes) -> tuple[Outcome, str]:
    (folder / "case.yaml").write_bytes(content)
    command = ["pretrain", "finetune", "compare", "tokenizer train"][len(content) % 4].split()
    return attempt([*command, f"--config={folder / 'case.yaml'}", "--print_config"]), f"{command} {content!r}"


# --- Texts and rows ----------------------------------------------------------------------------------------------

NAMES = st.binary(min_size=1, max_size=12) | st.text(min_size=1, max_size=12).map(str.encode)
FILES = st.tuples(
    st.lists(NAMES, min_size=1, max_size=4), st.sampled_from(SUFFIXES), CONTENTS, st.sampled_from("fffffsld")
)
CORPORA = st.tuples(
    st.lists(FILES, min_size=1, max_size=4), st.sampled_from(["inspect", "inspect", "train", "prepare"])
)


def try_text(made: Material, folder: Path, case: tuple[list[Any], str]) -> tuple[Outcome, str]:
    """A folder with any names, contents, links and loops, as a corpus."""
    files, command = case
    corpus = folder / "corpus"
    corpus.mkdir()
    for names, suffix, content, kind in files:
        with contextlib.suppress(OSError):  # names that the system refuses
            place_file(corpus, [*names[:-1], names[-1] + suffix.encode()], content, kind)
    where = ["--workers=1", f"--output={folder / 'out'}"]
    words = {
        "inspect": ["corpus", "inspect", str(corpus), "--workers=1"],
        "train": ["tokenizer", "train", f"--corpus={corpus}", *where, "--kind=byte"],
        "prepare": ["prepare", f"--corpus={corpus}", *where, f"--tokenizer={made.tokenizer}"],
    }[command]
    return attempt(words), f"{command} {files!r:.400}"


def place_file(corpus: Path, names: list[bytes], content: bytes, kind: str) -> None:
    """A file, a folder of that name, or a link to itself or to the corpus; half of the archives are none."""
    parts = [os.fsdecode(re.sub(rb"[\x00/]|^\.+", b"_", name)) for name in names]
    path = corpus.joinpath(*parts)
    (path if kind == "d" else path.parent).mkdir(parents=True, exist_ok=True)
    if kind in "sl":
        path.symlink_to(path if kind == "s" else corpus)
    elif kind == "f" and path.suffix == ".zip" and len(content) % 2:
        with zipfile.ZipFile(path, "w") as archive:
            for name in ("a.txt", "../../outside.txt", "/etc/outside.txt", "b/c.jsonl"):
                archive.writestr(name, content)
    elif kind == "f":
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" and len(content) % 2 else content)


CELLS = st.one_of(
    st.none(), st.text(max_size=20), st.integers(), FLOATS, st.booleans(), st.lists(st.text(max_size=3), max_size=2),
    st.sampled_from(["0", "1", 0, 1, "a lovely film", "x" * 10**5, "\ud800", "\x00", " ", {"a": 1}]),
)  # fmt: skip
COLUMNS = st.sampled_from("text text text label label label Text source".split())
TABLES = st.tuples(
    st.lists(st.dictionaries(COLUMNS, CELLS, max_size=3), max_size=5),
    st.sampled_from("jsonl csv tsv parquet jsonl.gz txt".split()),
    st.sampled_from([1.0, 1.0, 0.5, 0.9]),
    st.sampled_from(["predict", "evaluate", "stdin"]),
    st.sampled_from(["skip", "fail"]),
)


def try_rows(
    made: Material, folder: Path, case: tuple[list[dict[str, Any]], str, float, str, str]
) -> tuple[Outcome, str]:
    """Tables of a task with missing, wrong, huge and strange cells, or broken off; no row may get lost."""
    table, suffix, share, command, on_error = case
    path, out = folder / f"rows.{suffix}", folder / "out.jsonl"
    content = table_bytes(table, suffix)
    path.write_bytes(content[: int(len(content) * share)])
    asked = {"evaluate": ["evaluate", f"--data={path}"], "predict": ["predict", f"--input={path}", f"--output={out}"]}
    outcome = attempt(
        [*asked.get(command, ["predict"]), f"--bundle={made.classifier}", f"--on_error={on_error}"], content
    )
    if command == "predict" and suffix == "jsonl" and share == 1 and outcome.code == 0 and not outcome.wrong:
        written = out.read_bytes().count(b"\n")  # a text may hold other ends of lines
        if written != len(table):
            outcome = Outcome(0, "", "", f"rows lost: {len(table)} in, {written} out")
    return outcome, f"{command} {suffix} {share} {on_error} {table!r:.300}"


def table_bytes(table: list[dict[str, Any]], suffix: str) -> bytes:
    if suffix == "parquet":
        import pyarrow
        import pyarrow.parquet

        buffer = io.BytesIO()
        with contextlib.suppress(pyarrow.ArrowException, UnicodeError, OverflowError):  # what Arrow cannot hold
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table or [{"text": "x"}]), buffer)
        return buffer.getvalue()
    if suffix in ("csv", "tsv"):
        text = io.StringIO()
        writer = csv.writer(text, delimiter="," if suffix == "csv" else "\t")
        writer.writerows([["text", "label"], *([row.get("text"), row.get("label")] for row in table)])
        return text.getvalue().encode("utf-8", "surrogatepass")
    lines = "".join(json.dumps(row) + "\n" for row in table).encode()
    return gzip.compress(lines) if suffix == "jsonl.gz" else lines


REAL = [path.read_bytes() for path in sorted((PROJECT / "configs").rglob("*.yaml"))]
KINDS: dict[str, tuple[float, st.SearchStrategy[Any], Trial]] = {
    "settings": (0.35, settings_cases(), try_settings),
    "config files": (
        0.10,
        st.sampled_from(HURTING)
        | st.binary(max_size=60)
        | st.builds(damage, st.sampled_from(REAL), st.integers(0, 2**32)),
        try_file,
    ),
    "texts and folders": (0.20, CORPORA, try_text),
    "rows": (0.15, TABLES, try_rows),
    "damaged files": (0.18, DAMAGES, try_damage),
    "jobs": (0.02, job_cases(), try_job),
}
