"""Tables of rows: files and datasets, row after row, each made into what is wanted of it or refused with its number."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from pipeline.data import hub
from pipeline.data.sources import TABLE_READERS, TABLE_SUFFIXES, open_bytes
from pipeline.data.sources import Row as Columns
from pipeline.errors import UserError
from pipeline.terminal import note

__all__ = ["Columns", "converted", "stream"]
Made = TypeVar("Made")


def converted(file: str, convert: Callable[[Columns], Made], skip: bool) -> list[Made]:
    """What is made of the rows of a table; what is wrong with one is an error, or it is counted and left out."""
    found = list(stream(file, convert, skip))
    made = [one for one in found if one is not None]
    if len(made) < len(found):
        note(f"{file}: {len(found) - len(made):,} of {len(found):,} rows skipped")
    return made


def stream(file: str, convert: Callable[[Columns], Made], skip: bool) -> Iterator[Made | None]:
    """What is made of row after row; None stands for one that was wrong and may be skipped."""
    for number, columns in enumerate(table(file), 1):
        try:
            yield convert(columns)
        except UserError as error:
            if not skip:
                raise UserError(f"{file} row {number}: {error}") from error
            yield None


def table(file: str) -> Iterator[Columns]:
    """The rows of a file or of a Hugging Face dataset."""
    if file.startswith("hf:"):
        yield from hub.rows(file[3:], streaming=False)
        return
    path = Path(file)
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    if not path.is_file():
        raise UserError(f"{file}: no such file; rows are {', '.join(TABLE_SUFFIXES)}, hf:NAME, to train a set's name")
    if suffix not in TABLE_READERS:
        raise UserError(f"{file}: not a table; rows come from {', '.join(TABLE_SUFFIXES)}")
    with open_bytes(path, None, file) as opened:
        yield from TABLE_READERS[suffix](opened, file)
