"""One command in this process, with limits of time and memory, and a judgement of how it ends."""

import contextlib
import io
import re
import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline import cli

SECONDS = 60  # of work for one command; the slowest takes three
ROOM = 3 * 2**30  # bytes that all commands together may take on top of what is there
INSIDES = re.compile(r"NoneType|<class|object (is|has|of)|no attribute|unexpected keyword|not supported between")


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it may not do: a traceback, a hang, a refusal that is not one good line."""

    code: int
    output: str
    error: str
    wrong: str


def attempt(words: list[str], given: bytes = b"") -> Outcome:
    """Do a command here and judge how it ends; text goes through the encodings of a terminal."""
    out, err = io.BytesIO(), io.BytesIO()
    code, wrong, keyboard = 1, "", sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(given), "utf-8")
    try:
        with (
            time_limit(),
            contextlib.redirect_stdout(io.TextIOWrapper(out, "utf-8", write_through=True)),
            contextlib.redirect_stderr(io.TextIOWrapper(err, "utf-8", "backslashreplace", write_through=True)),
        ):
            code = cli.main(words)
            out, err = io.BytesIO(out.getvalue()), io.BytesIO(err.getvalue())
    except Exception as error:  # whatever it is, it would have reached a user
        ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "/pipeline/" in frame.filename]
        place = f" at {ours[-1].filename.rsplit('/pipeline/')[-1]}:{ours[-1].lineno}" if ours else ""
        wrong = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.100}{place}"
    finally:
        sys.stdin = keyboard
    told = err.getvalue().decode() if not wrong else ""
    if code not in (0, 2):
        wrong = wrong or f"exit code {code}"
    elif code == 2 and sum(line.startswith("error: ") for line in told.splitlines()) != 1:
        wrong = "exit code 2 without one line that says why"
    elif code == 2 and INSIDES.search(told):
        wrong = f"a message about the inside of the program: {told.splitlines()[-1]:.160}"
    return Outcome(code, out.getvalue().decode() if not wrong else "", told, wrong)


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Stop what works too long, or waits ten times as long: others may have the machine meanwhile."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"no end after {SECONDS} s")

    clocks = ((signal.ITIMER_PROF, signal.SIGPROF, SECONDS), (signal.ITIMER_REAL, signal.SIGALRM, 10 * SECONDS))
    for clock, number, seconds in clocks:
        signal.signal(number, stop)
        signal.setitimer(clock, seconds)
    try:
        yield
    finally:
        for clock, _, _ in clocks:
            signal.setitimer(clock, 0)


@contextlib.contextmanager
def memory_limit() -> Iterator[None]:
    """A command that asks for memory without end is refused it, instead of taking the machine down."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
