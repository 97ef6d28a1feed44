"""What people see: notes and progress on standard error, tables and results on standard output."""

import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text


def note(message: str) -> None:
    """One line of what is going on."""
    write_line(sys.stderr, message.replace("\n", " "))


def warn(message: str) -> None:
    """One line of what the user should look at."""
    note(f"warning: {message}")


def say(text: str) -> None:
    """A result."""
    write_line(sys.stdout, text)


def write_line(stream: TextIO, text: str) -> None:
    """Write a line; where its reader has left, the work goes on without one."""
    try:
        stream.write(text + "\n")
    except BrokenPipeError:
        is_closed(stream)


def is_closed(stream: TextIO) -> bool:
    """Whether the reader of a stream has left; what is written to it from then on goes nowhere."""
    watched = select.poll()
    watched.register(stream.fileno(), 0)
    if closed := bool(watched.poll(0)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return closed


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table, as wide as the terminal or, into a file or pipe, as wide as it is; numbers stand to the right."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for position, name in enumerate(header):
        numeric = bool(rows) and all(isinstance(row[position], int | float) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell_text(cell)) for cell in row))
    console = Console()
    if not console.is_terminal:
        console.width = 10_000
    with console.capture() as capture:
        console.print(Text(title, "bold"), table, sep="\n", highlight=False)  # a title of its own may be the wider one
    say("\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n")


def cell_text(cell: object) -> str:
    """Numbers with separators and three decimals, everything else as it is."""
    if isinstance(cell, bool) or not isinstance(cell, int | float):
        return str(cell)
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:,.3f}"


@contextmanager
def progress(description: str, total: float | None, unit: str = "") -> Iterator[Callable[[float], None]]:
    """Show how far a job is: a bar on a terminal, a line every ten seconds elsewhere. Yields `advance(amount)`."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lines_of_progress(description, total, unit)
        return
    amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda step: bar.advance(task, step)


def lines_of_progress(description: str, total: float | None, unit: str) -> Callable[[float], None]:
    done = 0.0
    last = time.monotonic()

    def advance(step: float) -> None:
        nonlocal done, last
        done += step
        if time.monotonic() - last >= 10:
            last = time.monotonic()
            note(f"{description}: {done:,.0f}" + (f" of {total:,.0f}" if total else "") + f" {unit}".rstrip())

    return advance


def reported(texts: Iterable[str], advance: Callable[[float], None]) -> Iterator[str]:
    """The same texts; each one that is used up moves a progress of bytes on."""
    for text in texts:
        yield text
        advance(len(text.encode()))
