"""The folder of a run: its settings, its metrics, its lock, and what may change when it goes on.

config.yaml, metrics.jsonl, checkpoints/, samples/, wandb/ and bundle/; it is complete when bundle/meta.json is there.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from pipeline.configuration import to_yaml
from pipeline.errors import Diverged, UserError
from pipeline.files import described, fingerprint, read_sealed, taken, write_sealed, write_text
from pipeline.terminal import note, warn
from pipeline.training import checkpoint

# Fields that leave what is learnt as it is; all others may not change when a run goes on.
FREE = re.compile(
    r"run_dir|resume|dry_run|tracking\..*|trainer\..*|data\.(micro_batch_size|loader_workers|workers|stores)"
    r"|optim\.(lr|muon_lr|weight_decay|schedule|warmup_steps|final_share|decay_share|clip)"
)
NOT_COMPARED = {"run_dir", "resume", "dry_run"}


def rank(devices: int = 1) -> int:
    """The number of this process among those that train together, so many a machine, before anything is set up.

    0 is in charge; whether it is 0 can be asked without knowing the devices.
    """
    told = os.environ
    if "RANK" in told:
        return int(told["RANK"])
    if "LOCAL_RANK" not in told and "SLURM_NTASKS" in told:  # a shell of srun has these too, its children LOCAL_RANK
        return int(told.get("SLURM_PROCID", 0))
    return int(told.get("NODE_RANK", 0)) * devices + int(told.get("LOCAL_RANK", 0))


@dataclass(frozen=True)
class Run:
    """A run on disk."""

    path: Path

    @property
    def stage(self) -> str:
        """The command that made it."""
        return "finetune" if "task" in self.settings else "pretrain"

    @property
    def bundle(self) -> Path:
        return self.path / "bundle"

    @property
    def diverged(self) -> Path:
        """The file that says that it did when it last went on."""
        return self.path / "diverged.txt"

    @property
    def begun(self) -> bool:
        """Whether it has come to training."""
        return (self.path / "metrics.jsonl").is_file()

    @property
    def finished(self) -> bool:
        return (self.bundle / "meta.json").is_file()

    @property
    def settings(self) -> dict[str, Any]:
        """What config.yaml says, or nothing if there is none."""
        path = self.path / "config.yaml"
        if not path.is_file():
            return {}
        with described(path, "put it back, or start again in another folder"):
            return dict(yaml.safe_load(path.read_text(encoding="utf-8")))

    @property
    def material(self) -> dict[str, Any]:
        """What was made for the run: its store, the fingerprints of its text or rows, its number of steps."""
        path, remedy = self.path / "prepared.json", "delete it; it is made again"
        with described(path, remedy):
            told = read_sealed(path, remedy) if path.is_file() else {}
            if "store" in told and not all(isinstance(told[key], str) for key in ("store", "corpus")):
                raise TypeError("a store is named by its folder and the fingerprint of its text")
        return told

    def add_material(self, facts: Mapping[str, Any]) -> None:
        """Record what was made for the run: other processes wait for it, and a resumed run needs no corpus."""
        known = self.material
        if {**known, **facts} != known:
            write_sealed(self.path / "prepared.json", {**known, **facts})

    def forget_material(self) -> None:
        """Let text and rows be read again before it comes to training: they may be what is mended."""
        if not self.begun:
            (self.path / "prepared.json").unlink(missing_ok=True)

    def log(self, row: Mapping[str, Any]) -> None:
        """Append a row of metrics."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All rows of metrics; one that was cut off in writing or is damaged is left out."""
        path = self.path / "metrics.jsonl"
        rows = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
            with suppress(ValueError, TypeError, KeyError):
                row = json.loads(line)
                rows.append(row | {"step": int(row["step"])})
        return rows

    def last_measured(self) -> dict[str, float]:
        """What the last validation found."""
        found = [row for row in self.rows() if "val/loss" in row]
        return {key: value for key, value in found[-1].items() if key.startswith("val/")} if found else {}

    def cut_back(self, step: int) -> None:
        """Forget metrics from after a step, which will come again."""
        path = self.path / "metrics.jsonl"
        whole = path.read_bytes().count(b"\n") if path.is_file() else 0
        if whole > len(self.rows()):
            warn(f"{path}: damaged, {whole - len(self.rows())} rows are left out")
        write_text(path, "".join(json.dumps(row) + "\n" for row in self.rows() if row["step"] <= step))


@contextmanager
def opened(config: Any, name: str) -> Iterator[Run]:
    """Open the folder of a run for the time of a job: a new one, or one that goes on if its settings are the same."""
    run = Run(Path(config.resume or config.run_dir or default_folder(config, name)))
    if rank() != 0:
        yield run
        return
    if config.resume and not run.settings:
        raise UserError(f"{run.path}: no run to resume (it has no config.yaml); `triptych runs FOLDER` lists runs")
    files = run.path.iterdir() if run.path.is_dir() else ()
    if not run.settings and any(not path.name.startswith(".") for path in files):  # a start that was killed leaves such
        raise UserError(f"{run.path}: not empty and not a run; choose another --run_dir")
    run.path.mkdir(parents=True, exist_ok=True)
    with (run.path / ".lock").open("w") as lock:
        if not taken(lock):
            raise UserError(f"{run.path}: another process works on this run; wait for it or stop it")
        if run.settings:
            check_changes(run, config)
        if not run.finished:
            write_text(run.path / "config.yaml", to_yaml(replace(config, resume=None)))
        run.diverged.unlink(missing_ok=True)
        run.forget_material()
        try:
            yield run
        except Diverged as error:
            write_text(run.diverged, f"{error}\n")
            raise
        finally:
            run.forget_material()


def default_folder(config: Any, name: str) -> Path:
    """Named by the settings, so that the same command goes on with the same run."""
    settings = {key: value for key, value in asdict(config).items() if key not in NOT_COMPARED}
    return Path("runs") / f"{name}-{fingerprint(settings)[:8]}"


def check_changes(run: Run, config: Any) -> None:
    """Say what changed since a run was started, and refuse what it could not go on with, once it has begun."""
    before, after = flat(run.settings), flat(yaml.safe_load(to_yaml(config)))
    changed = {
        key: f"{key} {before.get(key)} → {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key not in NOT_COMPARED
    }
    fixed = {"data.micro_batch_size"} if before.get("task.name") == "retrieval" else set()  # negatives are its others
    fatal = [words for key, words in changed.items() if key in fixed or not FREE.fullmatch(key)]
    if fatal and run.begun:
        raise UserError(
            f"{run.path}: a run with other settings is here, and it cannot go on with {', '.join(fatal)}; "
            "choose another --run_dir"
        )
    if changed and run.begun and not config.resume and not run.finished:
        raise UserError(
            f"{run.path}: a run with other settings is here: {', '.join(changed.values())}; go on with it by "
            f"--resume {run.path}, or choose another --run_dir"
        )
    if changed:
        note(f"changed since this run was started: {', '.join(changed.values())}")


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


# --- What there is -----------------------------------------------------------------------------------------------

RUNS_HEADER = ("run", "state", "step", "of", "best val/loss", "newest metrics", "go on with")


def runs_below(folder: Path) -> list[Run]:
    """The runs in a folder, or the folder itself if it is one."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; runs are made below runs/ by default")
    places = [folder, *sorted(path.parent for path in folder.rglob("config.yaml"))]
    return [Run(place) for place in dict.fromkeys(places) if (place / "metrics.jsonl").is_file()]


def describe(run: Run) -> tuple[object, ...]:
    """The row of a run in the table of runs."""
    rows = run.rows()
    step = max((row["step"] for row in rows), default=0)
    scores = [row["val/loss"] for row in rows if "val/loss" in row]
    state = "finished" if run.finished else "running" if is_locked(run) else "stopped"
    saved = checkpoint.found(run.path)
    go_on = "-" if state != "stopped" else f"triptych {run.stage} --resume {run.path}"
    newest = {key: value for row in rows for key, value in row.items() if key in ("train/loss", "val/loss")}
    words = ", ".join(f"{key} {value:.3f}" for key, value in newest.items())
    total = run.material.get("steps", "?")
    best = f"{min(scores):.4f}" if scores else "-"
    at = f" (saved at {saved[-1].step:,})" if saved and state == "stopped" else ""
    return (str(run.path), state + at, step, total, best, words or "-", go_on)


def is_locked(run: Run) -> bool:
    """Whether a process works on a run now."""
    if not (run.path / ".lock").is_file():
        return False
    with (run.path / ".lock").open() as lock:
        return not taken(lock)
