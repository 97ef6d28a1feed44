"""A cell of a study: one job, named by all that decides what it learns, and what it found."""

import glob
import hashlib
import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pipeline.data.tasks import TASKS
from pipeline.evaluation.plan import Candidate, read_settings
from pipeline.files import file_hash, fingerprint, read_json
from pipeline.training.config import FinetuneConfig, PretrainConfig
from pipeline.training.run import Run, flat

# What does not change what is learnt; a job is named by all the rest.
UNHASHED = re.compile(r"(run_dir|resume|dry_run|tracking|data\.(stores|workers|loader_workers))\b.*")


@dataclass(frozen=True)
class Cell:
    """One job of a study."""

    stage: str
    candidate: Candidate
    seed: int
    files: tuple[str, ...]
    options: dict[str, str]
    study: Path
    task: str = ""
    parent: "Cell | None" = None
    """The pretraining that it starts from."""
    rate: float | None = None
    """The learning rate, where a grid is tried."""

    @property
    def name(self) -> str:
        """What people call it."""
        rate = "" if self.rate is None else f"-lr{self.rate:g}"
        return f"{self.task or self.stage}-{self.candidate.name}-{self.seed}{rate}"

    @cached_property
    def folder(self) -> Path:
        """Named by all that decides what is learnt: settings, files and parent; others get another folder."""
        settings = {key: word for key, word in flat(asdict(self.config)).items() if not UNHASHED.fullmatch(key)}
        if settings["init_from"] is None:
            del settings["init_from"]  # folders of before it was hashed keep their names
        parent = self.parent.folder.name if self.parent else None
        return self.study / f"{self.name}-{fingerprint([settings, contents(self.config), parent])[:8]}"

    @property
    def run(self) -> Run:
        return Run(self.folder)

    @property
    def given_up(self) -> Path:
        """Says that a learning rate was tried and diverged."""
        return self.folder / "given-up.json"

    @cached_property
    def config(self) -> PretrainConfig | FinetuneConfig:
        """The settings, but for the folder and the start, which are named by them."""
        config: Any = replace(read_settings(self.stage, self.files, tuple(self.options.items())), seed=self.seed)
        return config if self.rate is None else replace(config, optim=replace(config.optim, lr=self.rate))

    @property
    def given(self) -> dict[str, str]:
        """The settings on top of the files."""
        given = self.options | {"seed": str(self.seed), "run_dir": str(self.folder)}
        if self.parent:
            given["init_from"] = str(self.parent.run.bundle)
        if self.rate is not None:
            given["optim.lr"] = str(self.rate)
        labels = {"study": self.study.name, "model_name": self.candidate.name}
        tracking = {"group": self.study.name, "name": self.name, "labels": json.dumps(labels)}
        tags = [self.stage, self.candidate.match or "unmatched", *([self.task] if self.task else [])]
        return given | {f"tracking.{key}": word for key, word in (tracking | {"tags": json.dumps(tags)}).items()}

    @property
    def command(self) -> list[str]:
        """What a user would type."""
        files = [word for file in self.files for word in ("--config", file)]
        return [self.stage, *files, *(word for key, value in self.given.items() for word in (f"--{key}", value))]

    @property
    def line(self) -> str:
        """The same in a shell."""
        return f"triptych {shlex.join(self.command)}"


def grouped(cells: Iterable[Cell]) -> dict[tuple[str, str], list[Cell]]:
    """The seeds of each kind of job and model together."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.task or "pretraining", cell.candidate.name), []).append(cell)
    return groups


def contents(config: PretrainConfig | FinetuneConfig) -> dict[str, str]:
    """The hashes of the files that a job reads: another text at the same place is another job."""
    named = {key: value for key, value in asdict(config.data).items() if key != "stores"}
    words = [word for value in named.values() for word in (value if isinstance(value, list) else [value])]
    if isinstance(config, FinetuneConfig) and config.task.function:
        words.append(config.task.function.rpartition(":")[0])
    words += [config.init_from, getattr(config, "init_decoder_from", None)]
    return {word: found for word in words if isinstance(word, str) and (found := content_hash(word))}


@cache
def content_hash(pattern: str) -> str:
    """Of a file, of all files in a folder, or of those that a glob matches; nothing where there are none."""
    digest = hashlib.sha256()
    places = [Path(place) for place in sorted(glob.glob(pattern, recursive=True))]
    for path in (path for place in places for path in ([place] if place.is_file() else sorted(place.rglob("*")))):
        if path.is_file():
            digest.update(f"{path.name} {file_hash(path)}\n".encode())
    return digest.hexdigest() if places else ""


def meta_of(cell: Cell) -> dict[str, Any] | None:
    """What the bundle of a finished job says of it, its metrics too."""
    return read_json(cell.run.bundle / "meta.json") if cell.run.finished else None


def result_of(cell: Cell) -> dict[str, Any] | None:
    """The same with what the job answered to every example and how good that is."""
    if (meta := meta_of(cell)) is None:
        return None
    split = "test" if (cell.folder / "test-predictions.jsonl").is_file() else "val"
    with (cell.folder / f"{split}-predictions.jsonl").open(encoding="utf-8") as lines:  # texts may hold U+2028
        return meta | {"split": split, "answers": [json.loads(line) for line in lines]}


def metric_of(result: dict[str, Any]) -> str:
    """The metric that a task is judged by."""
    return TASKS[result["task"]["name"]].metric
