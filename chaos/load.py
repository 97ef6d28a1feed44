"""Load: long runs, many rows, many and large files, many readers; memory and file handles have to stay flat."""

import hashlib
import json
import multiprocessing
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.material import Material, study_words, write_rows
from chaos.processes import Command
from tests.novels import novel
from tests.training.jobs import arguments


@dataclass(frozen=True)
class Result:
    """What was done, what it took (all processes together), and what was wrong, if anything."""

    name: str
    did: str
    seconds: float
    peak_megabytes: float
    wrong: str


@dataclass
class Watch:
    """A command that is watched: its memory in megabytes and its open files over time, children included."""

    command: Command
    memory: list[float] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        began = time.monotonic()
        while self.command.process.is_alive():
            family = self.command.family()
            self.memory.append(sum(map(own_memory, family)))
            self.handles.append(sum(map(open_files, family)))
            time.sleep(0.25)
        self.code, self.seconds = self.command.wait(), time.monotonic() - began

    def result(self, name: str, did: str, right: bool = True, flat: bool = False) -> Result:
        wrong = "" if right and self.code == 0 else f"ended with {self.code}: {self.command.told[-300:]}"
        return Result(name, did, self.seconds, max(self.memory, default=0), wrong or (self.growth() if flat else ""))

    def growth(self) -> str:
        """What grew from the second fifth of the time, when everything has long been loaded, to the last."""
        if len(self.memory) < 10:
            return ""  # too short to grow
        fifth = len(self.memory) // 5
        for what, values, spare in (("memory", self.memory, 24.0), ("open files", self.handles, 8.0)):
            early, late = max(values[fifth : 2 * fifth]), max(values[-fifth:])
            if late > 1.05 * early + spare:
                return f"{what} grew from {early:.0f} to {late:.0f}"
        return ""


def own_memory(pid: int) -> float:
    """Memory of a process without the pages of mapped files."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def open_files(pid: int) -> int:
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return 0


def soak(made: Material, folder: Path, steps: int) -> Result:
    """Pretraining for many steps, with validations, checkpoints, samples and tracking."""
    often: dict[str, Any] = {"trainer__save_every": 50, "trainer__validate_every": 100, "tracking__samples_every": 200}
    words = arguments(made.novels, folder / "run", trainer__max_steps=steps, tracking__mode="offline", **often)
    watch = Watch(Command(words, folder / "out.txt", {"WANDB_MODE": "offline"}))
    kept = len(list((folder / "run" / "checkpoints").glob("*.pt")))
    (memory, files), (later, more) = ((watch.memory[n], watch.handles[n]) for n in (len(watch.memory) // 4, -4))
    did = f"{steps:,} steps; memory {memory:.0f} → {later:.0f} MB, {files} → {more} open files"
    return watch.result("soak of pretraining", did, kept <= 3, flat=True)


def predictions(made: Material, folder: Path, count: int) -> Result:
    """A prediction for each of very many rows."""
    table, output = write_rows(folder / "rows.jsonl", count), folder / "predicted.jsonl"
    words = ["predict", str(made.classifier), f"--input={table}", f"--output={output}", "--batch_size=256"]
    watch = Watch(Command(words, folder / "out.txt"))
    with output.open("rb") as opened:
        written = sum(1 for _ in opened)
    return watch.result("prediction", f"{written:,} rows", written == count, flat=True)


def many_files(made: Material, folder: Path, count: int) -> Result:
    for number in range(count):
        place = folder / "books" / f"{number % 97}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.txt").write_text(novel(number, 8))
    return prepared(made, folder, folder / "books", f"{count:,} files", count)


def one_file(made: Material, folder: Path, size: int) -> Result:
    part = "".join(novel(seed, 400) for seed in range(8))
    with (folder / "book.txt").open("w") as opened:
        for number in range(max(1, size // len(part.encode()))):
            opened.write(f"Chapter {number}\n{part.replace('the', f'the{number}')}")
    what = f"one file of {(folder / 'book.txt').stat().st_size / 1e6:,.0f} MB"
    return prepared(made, folder, folder / "book.txt", what, 1)


def prepared(made: Material, folder: Path, corpus: Path, what: str, documents: int) -> Result:
    words = [
        "prepare",
        f"--corpus={corpus}",
        f"--tokenizer={made.tokenizer}",
        f"--output={folder / 'stores'}",
        "--workers=2",
    ]
    watch = Watch(Command(words, folder / "out.txt"))
    splits = [json.loads(path.read_text())["splits"] for path in folder.glob("stores/*/manifest.json")]
    found = sum(split["documents"] for one in splits for split in one.values())
    return watch.result("preparing a store", what, found >= documents)


def odd_files(made: Material, folder: Path, size: int) -> Result:
    """One line of very many bytes, thousands of empty files, folders within folders, a loop, a name with a newline."""
    corpus = folder / "odd"
    deep = corpus.joinpath(*["deeper"] * 200)
    deep.mkdir(parents=True)
    (deep / "a name with\na newline.txt").write_text(novel(1))
    (corpus / "line.txt").write_bytes(b"It was a dark and stormy night, " * (size // 32))
    for number in range(10_000):
        (corpus / f"{number}.txt").touch()
    (corpus / "loop").symlink_to(corpus)
    watch = Watch(Command(["corpus", "inspect", str(corpus), "--workers=2"], folder / "out.txt"))
    did = f"a line of {size / 1e6:.0f} MB, 10,000 empty files, 200 folders deep, a loop of links"
    return watch.result("odd files", did, re.search(r"^dropped +10,000 ", watch.command.told, re.M) is not None)


def read_all(store: str, seed: int) -> str:
    """Read every window of a store in an order of one's own; a digest of them in theirs."""
    from pipeline.data.store import Store
    from pipeline.data.windows import Windows

    windows = Windows(Store.open(Path(store)).stream("train"), 64)
    read = {number: bytes(windows[number]) for number in random.Random(seed).sample(range(len(windows)), len(windows))}
    return hashlib.sha256(b"".join(read[number] for number in sorted(read))).hexdigest()


def readers(made: Material, folder: Path, count: int) -> Result:
    """Several processes that read one store at once."""
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        contents = set(pool.starmap(read_all, [(str(made.store), seed) for seed in range(count)]))
    wrong = "" if len(contents) == 1 else f"{len(contents)} different contents"
    return Result("readers of one store", f"{count} at once", time.monotonic() - began, 0.0, wrong)


def study(made: Material, folder: Path, cells: int) -> Result:
    """A study of very many tiny jobs."""
    seeds = max(1, cells // 2)
    watch = Watch(Command(study_words(made.rows, folder / "study", seeds, steps=2), folder / "out.txt"))
    done = len(list((folder / "study").rglob("bundle/meta.json")))
    return watch.result("a study", f"{done} cells, {seeds} seeds", done == 2 * seeds)


LOADS: dict[str, tuple[Callable[[Material, Path, int], Result], int]] = {
    "soak": (soak, 2000),
    "predictions": (predictions, 1_000_000),
    "many files": (many_files, 5000),
    "one file": (one_file, 10**9),
    "odd files": (odd_files, 200_000_000),
    "readers": (readers, 8),
    "study": (study, 100),
}


def try_load(made: Material, folder: Path, scale: float, only: str = "") -> Iterator[Result]:
    """Do everything at full size, or at a share of it."""
    for name, (load, size) in LOADS.items():
        if only in name:
            place = folder / name.replace(" ", "-")
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            yield load(made, place, max(2, int(size * scale)))
            shutil.rmtree(place)
