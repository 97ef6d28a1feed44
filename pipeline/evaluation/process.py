"""Jobs in processes of their own, so that nothing of them stays in memory; what stops us stops them in good order."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PREPARED = multiprocessing.get_context("forkserver")


def run_command(command: Sequence[str], prepared: bool = False) -> int:
    """Do one job and return its exit code; a prepared process has all imports done, but cannot start others itself."""
    if not prepared:
        process = subprocess.Popen([sys.executable, "-m", "pipeline", *command], process_group=0)
        return attended(process.pid, process.wait)
    PREPARED.set_forkserver_preload(["pipeline.training.finetuning", "pipeline.training.pretraining"])
    forked = PREPARED.Process(target=do, args=(list(command),))
    forked.start()
    assert forked.pid is not None

    def wait() -> int:
        forked.join()
        return forked.exitcode or 0

    return attended(forked.pid, wait)


def attended(pid: int, wait: Callable[[], int]) -> int:
    """Wait for a process and pass signals on to it: it saves and leaves, and so do we."""

    def pass_on(number: int, _: FrameType | None) -> None:
        os.kill(pid, number)

    before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        return wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def do(command: list[str]) -> None:
    """Be a process that does one job; out of the reach of the keyboard, but not beyond the life of its parent."""
    from pipeline import cli

    os.setpgid(0, 0)
    threading.Thread(target=leave_with_parent, daemon=True).start()
    sys.exit(cli.main(command))


def leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
