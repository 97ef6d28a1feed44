"""Faults: commands that are killed, starved of disk, cut off or damaged, and what they make when started again.

A trial is survived if the command then ends with what an undisturbed one makes (after damage: or says in one line why
it cannot), if no checkpoint that was complete is lost, and if no process and no temporary file stays.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from chaos.material import Material, finetune_words, study_words, write_rows
from chaos.processes import NOBODY, Command, after
from pipeline.files import file_hash
from tests.training.jobs import arguments, last_step, rows, write_novels
from tests.training.wandb_server import Handler, serving

TRAINED = ("run/bundle/model.safetensors", "run/metrics.jsonl")


@dataclass(frozen=True)
class Job:
    """A command that can be interrupted: what is typed for it to work in a folder, and where its result is."""

    name: str
    words: Callable[[Path], list[str]]
    result: tuple[str, ...] = TRAINED
    """Globs of the files that must be the same in the end."""
    settings: Mapping[str, int] = field(default_factory=dict)

    def begin(self, folder: Path, **settings: int) -> Command:
        folder.mkdir(parents=True, exist_ok=True)
        own = {"TMPDIR": str(folder)}
        return Command(self.words(folder), folder.with_suffix(".txt"), own, {**self.settings, **settings})

    def digest(self, folder: Path) -> str:
        """What was made, in a form that can be compared."""
        files = sorted(path for pattern in self.result for path in folder.glob(pattern))
        metrics = [json.dumps(rows(path.parent)) for path in files if path.name == "metrics.jsonl"]
        hashes = [f"{path.relative_to(folder)} {file_hash(path)}" for path in files if path.name != "metrics.jsonl"]
        return "\n".join(hashes + metrics)


def make_jobs(made: Material, folder: Path) -> list[Job]:
    """Small jobs of every kind that can be interrupted."""
    books, many = write_novels(folder / "books", count=6, paragraphs=2500), write_rows(folder / "many.jsonl", 6000)
    corpus = [f"--corpus={books}", "--workers=2"]
    ranks: dict[str, Any] = {"trainer__devices": 2, "trainer__max_steps": 40}
    return [
        Job("pretrain", lambda to: arguments(made.novels, to / "run")),
        Job("finetune", lambda to: finetune_words(made.rows, to / "run")),
        Job(
            "prepare", lambda to: ["prepare", *corpus, f"--tokenizer={made.tokenizer}", f"--output={to}"], ("*/*.bin",)
        ),
        Job("tokenizer", lambda to: ["tokenizer", "train", *corpus, f"--output={to}"], ("tokenizer.json", "meta.json")),
        Job(
            "predict",
            lambda to: ["predict", str(made.classifier), f"--input={many}", f"--output={to}/o.jsonl"],
            ("o.jsonl",),
        ),
        Job("study", lambda to: study_words(made.rows, to, seeds=1, steps=12), ("**/bundle/model.safetensors",)),
        Job("two ranks", lambda to: arguments(made.novels, to / "run", **ranks), settings={"anew": 1}),
    ]


@dataclass(frozen=True)
class Trial:
    """A job to be disturbed in a folder, at moments that are drawn within its usual time."""

    job: Job
    folder: Path
    seconds: float
    draw: random.Random
    undisturbed: Path

    def begin(self, **settings: int) -> Command:
        return self.job.begin(self.folder, **settings)

    def any_moment(self) -> Callable[[], bool]:
        return after(self.draw.uniform(0.02, self.seconds))


Disturb = Callable[[Trial], str]
"""Start a job, disturb it, and wait for its end; what was wrong already, or nothing."""


@dataclass
class Reference:
    """What a job makes when nobody disturbs it, and how long that takes."""

    job: Job
    folder: Path

    def __post_init__(self) -> None:
        began, command = time.monotonic(), self.job.begin(self.folder)
        if command.wait() != 0 or not self.job.digest(self.folder):
            raise RuntimeError(f"{self.job.name} fails undisturbed: {command.told}")
        self.seconds = time.monotonic() - began

    def survive(self, disturb: Disturb, draw: random.Random, again: int, refusable: bool) -> str:
        """Disturb a job so many times, then let it finish and compare; the problem, or nothing."""
        folder, job, newest = self.folder.with_name("trial"), self.job, -1
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".txt").unlink(missing_ok=True)
        for _ in range(again):
            if problem := disturb(Trial(job, folder, self.seconds, draw, self.folder)):
                return f"{problem}; it printed {folder.with_suffix('.txt').read_text(errors='replace')[-2000:]}"
            if not refusable and newest_complete(folder) < newest:
                return f"the checkpoint of step {newest} is gone, the newest is {newest_complete(folder)}"
            newest = newest_complete(folder)
        command = job.begin(folder)
        code = command.wait()
        if refusable and code == 2 and not badly_ended(command, code):
            return ""
        if code != 0 or "Traceback" in command.told:
            return f"started again, it ended with {code}: {command.told[-2000:]}"
        if job.digest(folder).splitlines()[:1] != job.digest(self.folder).splitlines()[:1]:
            return f"another result than undisturbed: {job.digest(folder)}, not {job.digest(self.folder)}"
        if not refusable and job.digest(folder) != job.digest(self.folder):
            return f"other metrics than undisturbed: {job.digest(folder)}, not {job.digest(self.folder)}"
        left = [path for path in folder.rglob("*") if path.name.endswith((".tmp", ".part")) or "pymp-" in path.name]
        return f"temporary files are left: {left}" if left else ""


def badly_ended(command: Command, code: int) -> str:
    """What is wrong with an end that should be success, or exit code 2 with a line."""
    fine = code == 0 or (code == 2 and command.told.count("error: ") == 1)
    return "" if fine and "Traceback" not in command.told else f"it ended with {code} and not with one line"


def newest_complete(folder: Path) -> int:
    """The newest step whose checkpoint is whole; -1 if there is none."""
    steps = [-1]
    for record in folder.rglob("step-*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            told = json.loads(record.read_text())
            steps += [int(told["step"])] if file_hash(record.with_suffix(".pt")) == told["sha256"] else []
    return max(steps)


# --- What is done to them ----------------------------------------------------------------------------------------


def killed(trial: Trial) -> str:
    """SIGKILL at a random moment, or inside a save."""
    moment = trial.any_moment()
    if trial.draw.random() < 0.4:
        moment = partial(lambda folder: any(True for _ in folder.rglob(".*.tmp")), trial.folder)
    command = trial.begin()
    command.when(moment, lambda: command.send(signal.SIGKILL))
    command.wait()
    return "" if command.leaves_nobody() else "processes are left after it was killed"


def told_to_stop(number: int, trial: Trial) -> str:
    """A signal after which a job saves and leaves with 75."""
    command, step = trial.begin(), trial.draw.randrange(1, 18)
    command.when(lambda: last_step(trial.folder / "run") >= step, lambda: command.send(number))
    code = command.wait()
    if code not in (75, 0):  # it may have been at its end
        return f"it ended with {code} after the signal"
    return "" if command.leaves_nobody() else "processes are left"


def full_disk(trial: Trial) -> str:
    """A disk of its own that is too small; then there is room again."""
    whole = sum(path.stat().st_size for path in trial.undisturbed.rglob("*") if path.is_file())
    size = trial.draw.randrange(20_000, max(21_000, int(1.1 * whole)))
    if not can_mount(trial.folder.parent):
        command = trial.begin(largest_file=size // 4)
        return badly_ended(command, command.wait())
    kept = trial.folder.with_name("kept")
    with small_disk(trial.folder, size):
        command = trial.begin()
        problem = badly_ended(command, command.wait())
        shutil.copytree(trial.folder, kept)
    shutil.rmtree(trial.folder)
    kept.rename(trial.folder)
    return problem


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def can_mount(folder: Path) -> bool:
    try:
        with small_disk(folder / "probe", 4096):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def read_only(trial: Trial) -> str:
    """Folders that may not be written any more, in the middle of the work of an ordinary user."""
    trial.folder.mkdir(parents=True, exist_ok=True)
    hand_over(trial.folder, NOBODY)
    command = trial.begin(as_nobody=1)
    command.when(trial.any_moment(), lambda: allow(trial.folder, 0o500))
    code = command.wait()
    allow(trial.folder, 0o700)
    hand_over(trial.folder, 0)
    return badly_ended(command, code)


def hand_over(folder: Path, user: int) -> None:
    for path in [folder, *folder.rglob("*")] if os.geteuid() == 0 else []:
        os.chown(path, user, user)


def allow(folder: Path, mode: int) -> None:
    for path in [folder, *folder.rglob("*")]:
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir():
                path.chmod(mode)


def damaged(kind: str, way: str, trial: Trial) -> str:
    """The newest file of a kind is truncated, zeroed or has a bit flipped, after the job was killed late."""
    command = trial.begin()
    command.when(lambda: newest_complete(trial.folder) >= 10, lambda: command.send(signal.SIGKILL))
    command.wait()
    path = sorted(trial.folder.glob(kind))[-1]
    content, where = path.read_bytes(), trial.draw.randrange(path.stat().st_size)
    flipped = bytes([content[where] ^ 1 << trial.draw.randrange(8)])
    path.write_bytes(
        {
            "truncated": content[:where],
            "zeroed": bytes(len(content)),
            "flipped": content[:where] + flipped + content[where + 1 :],
        }[way]
    )
    return ""


def without_corpus(trial: Trial) -> str:
    """The novels are taken away at a random moment, and come back before the next start."""
    words = trial.job.words(trial.folder)
    typed = next(
        word
        for before, word in zip(words, [*words[1:], ""], strict=True)
        if before == "--data.corpus" or "--corpus=" in word
    )
    novels = Path(typed.removeprefix("--corpus="))
    away = novels.with_name("away")
    command = trial.begin()
    command.when(trial.any_moment(), lambda: novels.rename(away))
    code = command.wait()
    if away.exists():
        away.rename(novels)
    return badly_ended(command, code)


def one_rank_killed(trial: Trial) -> str:
    """One of two ranks is killed; the other must not wait for it for ever."""
    command, step, number = trial.begin(), trial.draw.randrange(1, 36), trial.draw.choice([0, -1])
    both = partial(lambda run: last_step(run) >= step and len(command.family()) >= 2, trial.folder / "run")
    command.when(both, lambda: os.kill(command.family()[number], signal.SIGKILL))
    command.wait(300)
    return "" if command.leaves_nobody(90) else "the other rank is left"


def without_server(made: Material, stalls: bool, reference: Reference, draw: random.Random) -> str:
    """W&B's server stops answering, or goes away, in the middle; the job ends as ever, and is uploaded later."""
    folder = reference.folder.with_name("tracked")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    run, output, step = folder / "run", folder / "out.txt", draw.randrange(1, 18)
    with serving() as server, stalling() as answering:
        own = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "k" * 40, "WANDB_MODE": "online", "HOME": str(folder)}
        command = Command(arguments(made.novels, run, tracking__mode="online"), output, own)
        command.when(lambda: last_step(run) >= step, answering.clear if stalls else server.die)
        if command.wait() != 0 or reference.job.digest(folder) != reference.job.digest(reference.folder):
            return f"it did not end as ever: {command.told[-2000:]}"
        answering.set()
        if not stalls:
            server.revive()
        sync = Command(["sync", str(run)], output, own)
        code, steps = sync.wait(), [row.get("trainer/step") for one in server.runs.values() for row in one.rows]
        return "" if code == 0 and 24 in steps else f"sync failed: {sync.told[-2000:]}"


@contextlib.contextmanager
def stalling() -> Iterator[threading.Event]:
    """While the event is not set, W&B's server accepts requests and answers none."""
    answering, answer = threading.Event(), Handler.answer
    answering.set()

    def slow(self: Handler, *values: Any, **named: Any) -> None:
        answering.wait(600)
        answer(self, *values, **named)

    setattr(Handler, "answer", slow)  # noqa: B010  mypy
    try:
        yield answering
    finally:
        answering.set()
        setattr(Handler, "answer", answer)  # noqa: B010


# --- All of them -------------------------------------------------------------------------------------------------

KILLS = {"pretrain": 0.3, "finetune": 0.2, "prepare": 0.18, "tokenizer": 0.12, "predict": 0.12, "study": 0.08}
FILES = (
    "run/checkpoints/*.pt run/checkpoints/*.json run/config.yaml run/metrics.jsonl run/prepared.json stores/*/*.bin "
    "stores/*/manifest.json run/tokenizer/tokenizer.json run/tokenizer/meta.json"
).split()


@dataclass(frozen=True)
class Fault:
    """What is done to a job, and how often."""

    name: str
    how: str
    job: str
    disturb: Disturb
    times: float
    again: int = 1
    """So many times before it may finish."""
    refusable: bool = False
    """Whether it may say, in one line, that it cannot go on."""


def all_faults(times: int, disk: str) -> Iterator[Fault]:
    """Kill jobs `times` times, and try every other fault in proportion."""
    few = times / 10
    for job, share in KILLS.items():
        yield Fault(
            f"SIGKILL of {job}",
            "at any moment, 2 in 5 inside a save",
            job,
            killed,
            times * share,
            1 if job == "study" else 2,
        )
    for job in ("pretrain", "finetune"):
        for number in (signal.SIGTERM, signal.SIGUSR1):
            yield Fault(f"{number.name} to {job}", "saves and leaves with 75", job, partial(told_to_stop, number), few)
    for job in ("pretrain", "finetune", "prepare", "tokenizer", "predict"):
        yield Fault(f"full disk in {job}", disk, job, full_disk, few)
    for job in ("pretrain", "predict"):
        yield Fault(f"read-only folders in {job}", "chmod 500, as an ordinary user", job, read_only, few)
    for kind in FILES:
        for way in ("truncated", "zeroed", "flipped"):
            how = "one bit of the file of a killed run" if way == "flipped" else "the file of a killed run"
            yield Fault(f"{kind} {way}", how, "pretrain", partial(damaged, kind, way), 0.6 * few, refusable=True)
    for job in ("pretrain", "prepare"):
        yield Fault(f"corpus removed in {job}", "and put back", job, without_corpus, few)
    yield Fault("one of two ranks killed", "either, at a random step", "two ranks", one_rank_killed, few)


@dataclass
class Count:
    """How often a fault was tried, and what was lost."""

    name: str
    how: str
    times: int = 0
    lost: list[str] = field(default_factory=list)

    def add(self, problem: str, times: int = 1) -> None:
        self.times += times
        self.lost += [problem] * times if problem else []
        sys.stderr.write(f"{self.name}: {problem or 'survived'}\n")


def try_faults(made: Material, folder: Path, times: int, seed: int, only: str = "") -> Iterator[Count]:
    """Try the faults whose names hold `only`."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs, references = {job.name: job for job in make_jobs(made, folder)}, {}

    def reference(name: str) -> Reference:
        if name not in references:
            references[name] = Reference(jobs[name], folder / f"undisturbed-{name.replace(' ', '-')}")
        return references[name]

    disk = "a tmpfs too small for it" if can_mount(folder) else "files of limited size (no right to mount)"
    for fault in (one for one in all_faults(times, disk) if only in one.name):
        count = Count(fault.name, fault.how)
        for number in range(max(1, round(fault.times / fault.again))):
            draw = random.Random(f"{seed} {fault.name} {number}")
            count.add(reference(fault.job).survive(fault.disturb, draw, fault.again, fault.refusable), fault.again)
        yield count
    for stalls, name in ((True, "W&B stops answering"), (False, "W&B goes away")):
        if only in name:
            count = Count(name, "a local server; then `triptych sync`")
            for number in range(max(1, round(times / 10))):
                count.add(without_server(made, stalls, reference("pretrain"), random.Random(f"{seed} {number}")))
            yield count
