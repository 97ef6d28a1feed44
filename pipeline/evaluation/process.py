"""Jobs in processes of their own, so that nothing of them stays in memory; what stops us stops them in good order."""

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from pipeline import cli
from pipeline.data.parallel import when_parent_ends


def run_command(command: Sequence[str], prepared: bool = False) -> int:
    """Do one job and return its exit code, or that of a stop where a signal came.

    A prepared process is a copy of this one with all imports done, which take longer than many a job. It cannot start
    others itself, so that it is for jobs of one process only.
    """
    if prepared and sys.platform == "linux":
        for module in ("pretraining", "finetuning"):
            importlib.import_module(f"pipeline.training.{module}")
        copy = multiprocessing.get_context("fork").Process(target=do, args=(list(command),))
        copy.start()
        return attended(copy.pid or 0, copy.join) or copy.exitcode or 0
    process = subprocess.Popen([sys.executable, "-m", "pipeline", *command], process_group=0)
    return attended(process.pid, process.wait) or process.returncode


def attended(pid: int, wait: Callable[[], object]) -> int:
    """Wait for a process and pass signals on to it: it saves and leaves, and so do we."""
    told: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        told.append(number)
        os.kill(pid, number)

    with signals_to(pass_on):
        wait()
    return cli.STOPPED if told else 0


@contextmanager
def signals_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let a handler have the signals that ask a process to stop, for the time of the block."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def do(command: list[str]) -> None:
    """Be a process that does one job: out of the reach of the keyboard, but not beyond the life of its parent."""
    os.setpgid(0, 0)
    when_parent_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))
    sys.exit(cli.main(command))
