"""Where text comes from: files, folders, globs, archives, tables and datasets, each as a stream of raw documents."""

import csv
import glob
import gzip
import io
import json
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

from pipeline.data import catalogue, hub
from pipeline.data.cleaning import Notes, clean, decode, without_surrogates
from pipeline.data.config import CorpusConfig
from pipeline.errors import UserError

TEXT_SUFFIXES = (".txt", ".text")
SAFE_BYTES, LARGEST_RATIO = 2**26, 50  # a packed file may fill this much memory, or so many times its own size


@dataclass(frozen=True, slots=True)
class Source:
    """One raw document, not read yet: small to send to another process, unless it is a row that carries its text."""

    name: str
    """What the document is called, whatever machine it is on."""
    location: str
    """Where it is, for messages."""
    clean: bool
    path: Path | None = None
    member: str | None = None
    """Its name inside a zip archive."""
    row: str | None = None
    """Its text, for a row of a table."""

    def read(self, notes: Notes) -> str | None:
        """The document's text, decoded and cleaned; None when it is not text."""
        text = decode(self.content(), notes) if self.row is None else without_surrogates(self.row)
        return clean(text, notes) if text and self.clean else text

    def content(self) -> bytes:
        assert self.path is not None
        with open_bytes(self.path, self.member, self.location) as opened:
            return opened.read()


def sources(config: CorpusConfig) -> Iterator[Source]:
    """All raw documents of a corpus: arguments as given, the files of each in path order, rows in theirs."""
    found = (source for argument in config.corpus for source in argument_sources(argument, config))
    return found if config.limit is None else islice(found, min(config.limit, sys.maxsize))


def argument_sources(argument: str, config: CorpusConfig) -> Iterator[Source]:
    if argument.startswith("hf:"):
        rows = hub.rows(argument[len("hf:") :], config.streaming)
        yield from row_sources(rows, argument, argument, config)
        return
    places = [Path(argument)]
    if not places[0].exists():
        matches = sorted(glob.glob(argument, recursive=True))
        places = [catalogue.get(argument)] if argument in catalogue.ENTRIES else list(map(Path, matches))
    if not places:
        raise UserError(
            f"corpus: nothing matches {argument!r}, no file, folder or catalogue entry (from {Path.cwd()}); "
            "see `triptych data list`, or write hf:NAME for a Hugging Face dataset"
        )
    found: dict[str, tuple[Path, str]] = {}  # a glob may match a folder and what is in it
    for path, name in (file for place in places for file in named_files(place)):
        found.setdefault(os.path.realpath(path), (path, name))
    if not found:
        suffixes = ", ".join((*TEXT_SUFFIXES, *TABLE_SUFFIXES))
        raise UserError(f"{argument}: no text in this folder; it takes {suffixes}, .gz and .zip")
    for path, name in found.values():
        yield from file_sources(path, name, config)


def named_files(place: Path) -> list[tuple[Path, str]]:
    """A file and its name, or everything readable below a folder, in path order."""
    if not place.is_dir():
        return [(place, place.name)]
    paths = sorted(path for path in files_below(place) if readable_suffix(path.name))
    return [(path, path.relative_to(place).as_posix()) for path in paths]


def files_below(folder: Path) -> Iterator[Path]:
    """Links are followed, loops are not, and a folder that a link leads to goes by its own name where it has one."""
    starts, seen = [folder], set[str]()
    for start in starts:
        for root, folders, files in os.walk(start):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            if (real := os.path.realpath(root)) in seen:
                folders.clear()
                continue
            seen.add(real)
            starts += [path for name in folders if (path := Path(root, name)).is_symlink()]
            yield from (Path(root, name) for name in files if not name.startswith("."))


def readable_suffix(name: str) -> bool:
    name = name.lower()
    return name.endswith(".zip") or name.removesuffix(".gz").endswith((*TEXT_SUFFIXES, *TABLE_SUFFIXES))


def file_sources(path: Path, name: str, config: CorpusConfig) -> Iterator[Source]:
    """The documents of one file: itself, the rows of a table, or the members of an archive."""
    if re.search(r"\.(tar(\.\w+)?|tgz|7z|rar)$", path.name.lower()):
        raise UserError(f"{path}: an archive of a kind that is not read; unpack it, or make it a .zip")
    if path.suffix.lower() != ".zip":
        yield from member_sources(path, None, printable(name), config)
        return
    try:
        with zipfile.ZipFile(path) as archive:
            members = sorted(member for member in archive.namelist() if readable_suffix(member))
    except zipfile.BadZipFile as error:
        raise UserError(f"{path}: not a zip archive, or damaged; fetch or make it again") from error
    for member in members:
        yield from member_sources(path, member, printable(f"{name}/{member}"), config)


def member_sources(path: Path, member: str | None, name: str, config: CorpusConfig) -> Iterator[Source]:
    location = printable(f"{path}/{member}" if member else str(path))
    suffix = Path((member or path.name).lower().removesuffix(".gz")).suffix
    if suffix not in TABLE_SUFFIXES:
        yield Source(name, location, config.clean, path, member)
        return
    with open_bytes(path, member, location) as opened:
        yield from row_sources(TABLE_READERS[suffix](opened, location), name, location, config)


def printable(name: str) -> str:
    """A name that can be shown and stored, whatever bytes the file system holds."""
    return os.fsencode(name).decode("utf-8", errors="replace").replace("\n", "�")


@lru_cache(maxsize=1)
def opened_zip(path: Path, _: int) -> zipfile.ZipFile:
    """An archive whose list of members is read once, not for each of them; anew when the file has changed."""
    return zipfile.ZipFile(path)


@contextmanager
def open_bytes(path: Path, member: str | None, location: str) -> Iterator[IO[bytes]]:
    """Open a file for reading, through zip and gzip where it is packed; damage found while reading is one line."""
    try:
        with ExitStack() as stack:
            stream: IO[bytes]
            if member is None:
                stream, size = stack.enter_context(path.open("rb")), path.stat().st_size
            else:
                archive = opened_zip(path, path.stat().st_mtime_ns)
                stream, size = stack.enter_context(archive.open(member)), archive.getinfo(member).compress_size
            gzipped = (member or path.name).lower().endswith(".gz")
            if gzipped:
                stream = cast(IO[bytes], stack.enter_context(gzip.GzipFile(fileobj=stream)))
            yield io.BufferedReader(Unpacked(stream, size, location)) if gzipped or member else stream
    except (zlib.error, EOFError, zipfile.BadZipFile, gzip.BadGzipFile, RuntimeError) as error:  # also: encrypted
        raise UserError(f"{location}: damaged archive ({error}); fetch or make it again") from error


class Unpacked(io.RawIOBase):
    """What comes out of a packed file, unless it is far more than text could be packed into so few bytes."""

    def __init__(self, stream: IO[bytes], packed_bytes: int, location: str) -> None:
        self.stream = stream
        self.most = max(SAFE_BYTES, LARGEST_RATIO * packed_bytes)
        self.location = location

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self.stream.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        data = self.stream.read(len(buffer))
        buffer[: len(data)] = data
        if self.stream.tell() > self.most:
            raise UserError(
                f"{self.location}: unpacks to more than {LARGEST_RATIO} times its size, as no text does; "
                "if you trust it, unpack it yourself"
            )
        return len(data)


# --- Tables ------------------------------------------------------------------------------------------------------

Row = dict[str, Any]


def row_sources(rows: Iterator[Row], name: str, location: str, config: CorpusConfig) -> Iterator[Source]:
    """One document a row; a row without the text column is the user's to mend."""
    for number, row in enumerate(rows, 1):
        text = row.get(config.text_column, row)
        if text is row:
            raise UserError(
                f"{location} row {number}: no column {config.text_column!r}; "
                f"it has {', '.join(map(str, row)) or 'none'}: choose one with --text_column"
            )
        if not isinstance(text, str | None):
            raise UserError(f"{location} row {number}: column {config.text_column!r} holds {text!r:.40}, not text")
        yield Source(f"{name}:{number}", f"{location} row {number}", config.clean, row=text or "")


def json_rows(stream: IO[bytes], location: str) -> Iterator[Row]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{location} line {number}: not valid JSON ({error})") from error
        if not isinstance(row, dict):
            raise UserError(f'{location} line {number}: expected an object such as {{"text": …}}, got {row!r:.40}')
        yield row


def separated_rows(stream: IO[bytes], location: str, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # a column may hold a whole novel
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    try:
        for number, row in enumerate(csv.DictReader(text, delimiter=delimiter, strict=True), 1):
            if None in row:
                raise UserError(
                    f"{location} row {number}: more cells than the header has; quote what holds {delimiter!r}"
                )
            yield row
    except UnicodeDecodeError as error:
        raise UserError(f"{location}: a table must be UTF-8 ({error}); convert it first") from error
    except csv.Error as error:
        raise UserError(f"{location}: not a valid table ({error})") from error


def parquet_rows(stream: IO[bytes], location: str) -> Iterator[Row]:
    import pyarrow.parquet  # heavy; only those who read Parquet pay for it

    try:
        for batch in pyarrow.parquet.ParquetFile(stream).iter_batches(batch_size=64):
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{location}: not a Parquet file, or damaged; fetch or make it again") from error


TABLE_READERS: dict[str, Callable[[IO[bytes], str], Iterator[Row]]] = {
    ".jsonl": json_rows,
    ".csv": partial(separated_rows, delimiter=","),
    ".tsv": partial(separated_rows, delimiter="\t"),
    ".parquet": parquet_rows,
}
TABLE_SUFFIXES = tuple(TABLE_READERS)
