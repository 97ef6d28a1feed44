"""Retrieval sets in the layout of BEIR: documents, queries, and how well each document answers each query.

A folder holds corpus.jsonl (_id, title, text), queries.jsonl (_id, text), and judgements in qrels.tsv or, a file a
split, in qrels/{train,dev,test}.tsv (query-id, corpus-id, score).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.data.cleaning import without_surrogates
from pipeline.data.tables import Columns, converted
from pipeline.data.tasks import Documents, Row
from pipeline.errors import UserError
from pipeline.terminal import note

CORPUS, QUERIES = "corpus.jsonl", "queries.jsonl"
HELD_OUT = 5  # of so many queries one is for validation, where no file says which


def read_splits(files: Mapping[str, str | None], skip: bool) -> dict[str, list[Row]]:
    """The rows of every split: for training one for each query and document that answers it, else one a query."""
    folder, opened = str(files["train"]), dict[Path, Documents]()
    if files["test"] and is_learnt(files["test"], folder, "test"):
        raise UserError(f"data.test: {files['test']} has the queries of data.train; name others, or leave it out")
    train = read_queries(folder, "train", skip, opened)
    if holds_out(files):
        note(f"{folder}: the queries whose hash says so, about one in {HELD_OUT}, are held out for validation")
        validation = {name: row for name, row in train.items() if is_held_out(name)}
        train = {name: row for name, row in train.items() if name not in validation}
    else:
        validation = read_queries(files["validation"] or folder, "dev", skip, opened)
    given = files["test"] or (folder if (Path(folder) / "qrels" / "test.tsv").is_file() else None)
    test = read_queries(given, "test", skip, opened) if given else {}
    pairs = [replace(row, target=name) for row in train.values() for name, grade in row.judged if grade > 0]
    return {"train": pairs, "validation": list(validation.values()), "test": list(test.values())}


def holds_out(files: Mapping[str, str | None]) -> bool:
    """Whether queries are held out for validation by their hash: no file says which are for it."""
    return is_learnt(files["validation"] or str(files["train"]), str(files["train"]), "dev")


def is_learnt(place: str, trained_on: str, split: str) -> bool:
    """Whether a place has no judgements of a split but those that training reads."""
    own = judgements(place, split)
    same = Path(place).resolve() == Path(trained_on).resolve() and own.name != f"{split}.tsv"
    return same or own.resolve() == judgements(trained_on, "train").resolve()


def judgements(place: str, split: str) -> Path:
    """The file with the judgements of a split: the place itself, or in a folder its own of the split or that of all."""
    named = Path(place) if place.endswith(".tsv") else Path(place) / "qrels" / f"{split}.tsv"
    return named if named.is_file() else Path(place) / "qrels.tsv"


def is_held_out(query: str) -> bool:
    """By the hash of its id, so that everyone who splits a set holds out the same queries."""
    return int(hashlib.sha256(query.encode()).hexdigest(), 16) % HELD_OUT == 0


def read_queries(place: str, split: str, skip: bool, opened: dict[Path, Documents] | None = None) -> dict[str, Row]:
    """The judged queries of a split of a folder, or of a file of judgements in it, by id."""
    path, file = Path(place), judgements(place, split)
    folder = next((folder for folder in file.parents if (folder / CORPUS).is_file()), path)
    for needed in (folder / CORPUS, folder / QUERIES, file):
        if not needed.is_file():
            wanted = f"{CORPUS}, {QUERIES} and qrels.tsv or qrels/{split}.tsv"
            raise UserError(f"{needed}: no such file; retrieval reads a folder with {wanted}")
    opened = {} if opened is None else opened
    documents = opened[folder] = opened.get(folder) or read_documents(folder, skip)
    queries = read_texts(folder / QUERIES, ("text",), skip)
    judged = read_judged(file, queries, documents, skip)
    return {name: as_row(queries[name], judged[name], documents) for name in judged}


def as_row(query: str, judged: Mapping[str, int], documents: Documents) -> Row:
    best = max(judged, key=lambda name: judged[name])
    return Row(query, best if judged[best] > 0 else None, judged=tuple(judged.items()), documents=documents)


def read_documents(folder: Path, skip: bool) -> Documents:
    """What can be found."""
    if not (folder / CORPUS).is_file():
        raise UserError(f"{folder / CORPUS}: no such file; documents are read from a folder that has one")
    return Documents.of(read_texts(folder / CORPUS, ("title", "text"), skip))


def read_texts(file: Path, columns: Sequence[str], skip: bool) -> dict[str, str]:
    """Texts by id, each from one column or several."""
    found: dict[str, str] = {}

    def add(row: Columns) -> str:
        name = identifier(row, "_id")
        parts = [without_surrogates(text).strip() for column in columns if isinstance(text := row.get(column), str)]
        if not any(parts):
            raise UserError(f"{name!r} has no text in column {' or '.join(map(repr, columns))}")
        if name in found:
            raise UserError(f"_id {name!r} comes a second time")
        found[name] = " ".join(filter(None, parts))
        return name

    if not converted(str(file), add, skip):
        raise UserError(f"{file}: no rows in it")
    return found


def read_judged(file: Path, queries: Mapping[str, str], documents: Documents, skip: bool) -> dict[str, dict[str, int]]:
    """For each query the grades of documents."""
    judged: dict[str, dict[str, int]] = {}

    def add(row: Columns) -> str:
        query, document, grade = identifier(row, "query-id"), identifier(row, "corpus-id"), row.get("score")
        for name, known, place in ((query, queries, QUERIES), (document, documents.texts, CORPUS)):
            if name not in known:
                raise UserError(f"{name!r} is not in {place}")
        if not isinstance(grade, str) or not grade.strip().removeprefix("-").isdecimal():
            raise UserError(f"column 'score' holds {grade!r:.40}, which is no whole number")
        judged.setdefault(query, {})[document] = int(grade)
        return query

    converted(str(file), add, skip)
    return judged


def identifier(row: Columns, column: str) -> str:
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        has = f"holds {value!r:.40}" if column in row else f"is missing; there are {', '.join(map(str, row))}"
        raise UserError(f"column {column!r} {has}; it should hold an id")
    return str(value)
