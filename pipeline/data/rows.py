"""Rows of a task: read from tables, datasets and the catalogue, or made up; checked, limited, split."""

import hashlib
import importlib.util
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data import catalogue
from pipeline.data.cleaning import without_surrogates
from pipeline.data.config import TaskConfig, TaskDataConfig
from pipeline.data.retrieval import holds_out, read_splits
from pipeline.data.tables import Columns, converted
from pipeline.data.tasks import TASKS, Row
from pipeline.errors import UserError
from pipeline.terminal import note, warn

ROLES = ("source", "target", "label", "references")  # of the columns of a table


@dataclass(frozen=True)
class Rows:
    """The rows of each split, and a fingerprint of them all."""

    train: list[Row]
    validation: list[Row]
    test: list[Row] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    """The classes of all training rows, also of those that a limit leaves out."""
    held_out: bool = False
    """Whether queries are held out for validation by the hash of their ids."""

    def texts(self) -> Iterator[str]:
        """All that there is to read in training."""
        for row in self.train:
            yield row.source
            yield from () if row.documents else row.answers
        for documents in {row.documents for row in self.train if row.documents}:
            yield from documents.texts.values()

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for split in (self.train, self.validation, self.test):
            for row in split:
                digest.update(repr(row).encode(errors="surrogatepass"))
            digest.update(b"\n")
        return digest.hexdigest()


def read_task(task: TaskConfig, data: TaskDataConfig, seed: int) -> Rows:
    """Read or make the rows of every split; where nothing is held out, a tenth of train is."""
    kind = TASKS[task.name].kind
    if TASKS[task.name].generated:
        return made_up(task, seed)
    if data.train is None:
        raise UserError(f"data.train: task {task.name} needs rows to learn from or a name from `triptych data list`")
    files = {"train": data.train, "validation": data.validation, "test": data.test}
    if data.train in catalogue.ENTRIES:
        holds = catalogue.ENTRIES[data.train].kind
        if holds == "corpus" or (holds == "retrieval") != (kind == "retrieval"):
            raise UserError(f"data.train: {data.train} is for {holds}, not for {task.name}; see `triptych data list`")
        folder = catalogue.get(data.train)
        for split, name in (("train", "train"), ("validation", "dev"), ("test", "test")):
            if split == "train" or files[split] is None:
                path = folder / (name if kind == "retrieval" else f"{name}.jsonl")
                files[split] = str(path) if path.exists() else None
    skip = data.on_error == "skip"
    if kind == "retrieval":
        splits = read_splits(files, skip)
    else:
        choose = ": choose one with --task.{role}_column"
        splits = {split: read_rows(file, task, skip, choose) if file else [] for split, file in files.items()}
    if not splits["validation"] and kind != "retrieval":
        warn("no validation rows: a tenth of the training rows is held out, by the hash of their text")
        splits["train"], splits["validation"] = divided(splits["train"])
    train = limited(splits["train"], data.limit, seed)
    labels = label_names(splits["train"]) if train and kind == "classification" else []
    for split in ("validation", "test") if labels else ():
        splits[split] = with_known_labels(splits[split], labels, str(files[split]), skip)
    for split, rows in (("train", train), ("validation", splits["validation"])):
        if not rows:
            place = files[split] or f"{data.train} that could be held out; name a file"
            raise UserError(f"data.{split}: no rows in {place}")
    return Rows(train, splits["validation"], splits["test"], labels, kind == "retrieval" and holds_out(files))


def with_known_labels(rows: list[Row], labels: list[str], file: str, skip: bool) -> list[Row]:
    """Refuse a class that training never sees, with the row it stands in, or leave such rows out."""
    unknown = {number: row for number, row in enumerate(rows) if row.label is not None and row.label not in labels}
    for number, row in unknown.items() if not skip else ():
        known = ", ".join(labels[:10])
        raise UserError(f"{file} row {number + 1}: label {row.label!r} is not one of the training rows ({known})")
    if unknown:
        note(f"{file}: {len(unknown):,} of {len(rows):,} rows skipped: their labels are not among the training rows")
    return [row for number, row in enumerate(rows) if number not in unknown]


def read_rows(file: str, task: TaskConfig, skip: bool, choose: str) -> list[Row]:
    """The rows of a table; where it lacks a column, `choose` says how this command can be told of another."""
    return converted(file, row_maker(task, choose), skip)


def row_maker(task: TaskConfig, choose: str, answers: bool = True) -> Callable[[Columns], Row]:
    """What makes a row of a task from the columns of a table, by the user's own function where there is one."""
    if task.function is None:
        return partial(as_row, task=task, names=column_names(task), answers=answers, choose=choose)
    change, names = own_function(task.function), {role: role for role in ROLES}

    def make(columns: Columns) -> Row:
        try:
            changed = change(columns)
        except Exception as error:  # whatever their code does
            raise UserError(f"{task.function}: {type(error).__name__}: {error}") from error
        if not isinstance(changed, dict):
            raise UserError(f"{task.function}: made {changed!r:.40}, not a dict with source, and target or label")
        return as_row(changed, task, names, answers)

    return make


def own_function(place: str) -> Callable[[Columns], Any]:
    """The user's function FILE.py:NAME; nothing but what they named is run."""
    file, _, name = place.rpartition(":")
    specification = importlib.util.spec_from_file_location(Path(file).stem, file) if Path(file).is_file() else None
    if specification is None or specification.loader is None:
        raise UserError(f"task.function: no file {file!r} of Python; write FILE.py:NAME")
    module = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except Exception as error:  # whatever their code does
        raise UserError(f"task.function: {file} cannot be run: {type(error).__name__}: {error}") from error
    found: Callable[[Columns], Any] | None = getattr(module, name, None)
    if not callable(found):
        raise UserError(f"task.function: {file} has no function {name!r}")
    return found


def as_row(columns: Columns, task: TaskConfig, names: dict[str, str], answers: bool, choose: str = "") -> Row:
    """A row of a task from the columns of a table."""
    source = text_of(columns, names["source"], "source", choose)
    if not answers:
        return Row(source)
    if TASKS[task.name].kind == "classification":
        value = columns.get(names["label"])
        if value in (None, "") or isinstance(value, list | dict) or (isinstance(value, float) and value != value):
            raise UserError(missing(columns, names["label"], "label", choose))
        return Row(source, label=without_surrogates(str(int(value) if isinstance(value, bool) else value)))
    target = text_of(columns, names["target"], "target", choose).strip()  # as what models write is
    named = names.get("references", "")
    several = columns.get(named)
    if named == task.references_column and not isinstance(several, list):
        raise UserError(missing(columns, named, "references", choose))
    texts = [text for text in several if isinstance(text, str)] if isinstance(several, list) else []
    return Row(source, target, references=tuple(without_surrogates(text).strip() for text in texts))


def column_names(task: TaskConfig) -> dict[str, str]:
    """Which column holds what: as the settings say, else as the task has it."""
    columns = (task.source_column, task.target_column, task.label_column, task.references_column)
    given = dict(zip(ROLES, columns, strict=True))
    return TASKS[task.name].columns | {name: column for name, column in given.items() if column}


def text_of(columns: Columns, name: str, role: str, choose: str) -> str:
    value = columns.get(name)
    if not isinstance(value, str):
        raise UserError(missing(columns, name, role, choose))
    value = without_surrogates(value)
    if not value.strip():
        raise UserError(f"column {name!r} is empty; remove the row, or skip such rows by on_error")
    return value


def missing(columns: Columns, name: str, role: str, choose: str) -> str:
    if name not in columns:
        return f"no column {name!r}; it has {', '.join(map(str, columns))}{choose.format(role=role)}"
    return f"column {name!r} holds {columns[name]!r:.40}, which is no {role}"


def divided(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Rows to learn from and rows held out by the hash of their text; a class is never held out as a whole."""
    held_out = [int.from_bytes(hashlib.sha256(row.source.encode()).digest()[:4]) % 10 == 0 for row in rows]
    learnt = {row.label for row, out in zip(rows, held_out, strict=True) if not out}
    parts: tuple[list[Row], list[Row]] = [], []
    for row, out in zip(rows, held_out, strict=True):
        parts[out and row.label in learnt].append(row)
    return parts


def limited(rows: list[Row], limit: int | None, seed: int) -> list[Row]:
    """So many rows, drawn by the seed: files may be sorted by label."""
    if limit is None or limit >= len(rows):
        return rows
    chosen = np.sort(np.random.default_rng((seed, 1)).permutation(len(rows))[:limit])
    return [rows[number] for number in chosen]


def label_names(rows: Iterable[Row]) -> list[str]:
    """The labels of rows, numbers by size and words by name; at least two."""
    names = sorted({row.label for row in rows if row.label is not None}, key=lambda name: (not is_number(name), name))
    if all(map(is_number, names)):
        names.sort(key=float)
    if len(names) < 2:
        raise UserError(f"data.train: all rows have the label {', '.join(names)}; there is nothing to learn")
    return names


def is_number(text: str) -> bool:
    return text.removeprefix("-").replace(".", "", 1).isdecimal()


# --- Rows that are made up ---------------------------------------------------------------------------------------


def made_up(task: TaskConfig, seed: int) -> Rows:
    """Strings to reverse or to write in capitals or small letters (worksheets 000 and 001).

    The hash of a string decides its split, so that none is in two, and every seed is measured on the same strings.
    """
    held_out = max(1, task.examples // 10)
    validation, test = (
        list(dict.fromkeys(islice(made_up_rows(task, random.Random(0), part), held_out))) for part in (0, 1)
    )
    return Rows(list(islice(made_up_rows(task, random.Random(seed), 2), task.examples)), validation, test)


def made_up_rows(task: TaskConfig, draw: random.Random, part: int) -> Iterator[Row]:
    """Rows of one split without end: of twelve strings one is for validation (0), one for test (1)."""
    alphabet = "abcd" if task.name == "reversal" else "abcdABCD"
    for _ in range(1000 * task.examples):
        letters = "".join(draw.choices(alphabet, k=draw.randint(task.shortest, task.longest)))
        mark = draw.choice(("<U>", "<L>")) if task.name == "case" else ""
        if min(2, hashlib.sha256((mark + letters).encode()).digest()[0] % 12) == part:
            target = letters[::-1] if not mark else letters.upper() if mark == "<U>" else letters.lower()
            yield Row(mark + letters, target)
    raise UserError("task.longest: there are too few strings of these lengths; raise it")
