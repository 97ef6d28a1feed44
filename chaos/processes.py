"""Real commands in processes of their own, which can be killed, watched and counted."""

import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

PROJECT = Path(__file__).parent.parent
PATIENCE = 1200  # seconds of the clock; others may use this machine
NOBODY = 65534
SERVER = multiprocessing.get_context("forkserver")  # what is imported here once need not be for each command
SERVER.set_forkserver_preload(["pipeline.stages", "pipeline.training.finetuning", "pipeline.answers"])


def become(words: Sequence[str], output: str, environment: Mapping[str, str], settings: Mapping[str, int]) -> None:
    """What a new process does: take on what the settings say, then the command."""
    os.setsid()  # whatever it starts can be found by this session
    os.environ.update(environment)
    opened = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    if "umask" in settings:
        os.umask(settings["umask"])
    if "largest_file" in settings:
        resource.setrlimit(resource.RLIMIT_FSIZE, (settings["largest_file"],) * 2)
    if "as_nobody" in settings and os.geteuid() == 0:
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if "anew" in settings:  # for what starts itself again with its own command line
        os.execv(sys.executable, [sys.executable, "-m", "pipeline", *words])
    import torch

    from pipeline import cli

    torch.set_num_threads(1)
    sys.exit(cli.main(words))


@dataclass
class Command:
    """A command that was started; what it prints is appended to a file."""

    words: Sequence[str]
    output: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.printed_before = self.output.stat().st_size if self.output.exists() else 0
        environment = {**os.environ, **self.environment}  # the server that makes it may have had another
        arguments = (list(self.words), str(self.output), environment, dict(self.settings))
        self.process = SERVER.Process(target=become, args=arguments)
        self.process.start()

    @property
    def told(self) -> str:
        """What it has printed."""
        content = self.output.read_bytes() if self.output.exists() else b""
        return content[self.printed_before :].decode(errors="replace")

    def wait(self, seconds: float = PATIENCE) -> int:
        """Its exit code; what does not end is killed."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.end()
            self.process.join()
        code = self.process.exitcode
        return -signal.SIGKILL if code is None else code

    def when(self, condition: Callable[[], bool], action: Callable[[], object]) -> bool:
        """Do something as soon as a condition holds; whether it did before the command ended."""
        deadline = time.monotonic() + PATIENCE
        while self.process.is_alive() and time.monotonic() < deadline:
            if condition():
                action()
                return True
            time.sleep(0.001)
        return False

    def send(self, number: int) -> None:
        if self.process.pid and self.process.is_alive():
            os.kill(self.process.pid, number)

    def family(self) -> list[int]:
        """Its processes, itself included, as far as they have not ended."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, _, session = path.read_text().rsplit(")", 1)[1].split()[:4]
            except OSError:
                continue
            if int(session) == self.process.pid and state not in "ZX":
                found.append(int(path.parent.name))
        return sorted(found)

    def end(self) -> int:
        """Kill what is left of it; how many that were."""
        left = self.family()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return len(left)

    def leaves_nobody(self, seconds: float = 30) -> bool:
        """Whether all that it started ends soon after it."""
        deadline = time.monotonic() + seconds
        while self.family() and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.end() == 0


def after(seconds: float) -> Callable[[], bool]:
    """A condition that holds after some time."""
    return partial(lambda moment: time.monotonic() >= moment, time.monotonic() + seconds)
