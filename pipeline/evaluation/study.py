"""A study: models × tasks × seeds, cell by cell, each a job that goes on if it was stopped and is never done twice."""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from pipeline.cli import STOPPED
from pipeline.configuration import to_yaml
from pipeline.data.tasks import TASKS
from pipeline.errors import Stopped, UserError
from pipeline.evaluation.cell import Cell, meta_of, metric_of
from pipeline.evaluation.config import StudyConfig, typed
from pipeline.evaluation.plan import Candidate, plan_candidates, plan_rows, read_settings, warn_of_distance, write_plan
from pipeline.evaluation.process import run_command
from pipeline.files import write_json, write_text
from pipeline.model.config import ModelConfig, resolve
from pipeline.terminal import note, print_table
from pipeline.training.checkpoint import FOLDER as CHECKPOINTS

KEPT_BYTES, SAVED_BYTES = 4, 12  # a parameter of a bundle, and of a checkpoint with its optimizer


@dataclass(frozen=True)
class Study:
    """A study with its plan made: what each model is, and every job."""

    config: StudyConfig
    candidates: dict[str, Candidate]

    @property
    def folder(self) -> Path:
        return Path(self.config.run_dir)

    @cached_property
    def tasks(self) -> dict[str, str]:
        """The file of each task that is not left out."""
        named = {Path(file).stem: file for file in self.config.tasks}
        if len(named) < len(self.config.tasks) or "pretrain" in named:
            raise UserError("tasks: every file needs a name of its own, and none may be called pretrain")
        if unknown := [name for name in self.config.skip if name not in named]:
            raise UserError(f"skip: {unknown[0]!r} is none of the tasks {', '.join(named)}")
        return {name: file for name, file in named.items() if name not in self.config.skip}

    @property
    def seeds(self) -> range:
        return range(1, self.config.seeds + 1)

    def doing(self, task: str) -> list[Candidate]:
        """The models that do a task; one that starts from another leaves out what that one can do by itself."""
        settings = read_settings("finetune", (self.tasks[task],), tuple(self.config.task_options.items()))
        able = TASKS[settings.task.name].families
        found = []
        for one in self.candidates.values():
            start = self.candidates[one.start].model.family if one.start else None
            if one.model.family in able and (start == one.model.family or start not in able):
                found.append(one)
        return found

    def pretraining(self) -> Iterator[Cell]:
        """The pretraining jobs, shared by all tasks."""
        for seed in self.seeds if self.config.pretrain else ():
            for candidate in self.candidates.values():
                if not candidate.start:
                    yield self.pretrain_cell(candidate, seed)

    def pretrain_cell(self, candidate: Candidate, seed: int) -> Cell:
        options = self.config.pretrain_options | candidate.options | model_options(candidate.model)
        return Cell("pretrain", candidate, seed, tuple(self.config.pretrain), options, self.folder)

    def finetuning(self, task: str, candidate: Candidate, seed: int, rate: float | None = None) -> Cell:
        """One fine-tuning job."""
        options, parent = dict(self.config.task_options), None
        if self.config.pretrain:
            parent = self.pretrain_cell(self.candidates[candidate.start or candidate.name], seed)
        if not parent or candidate.start:
            options |= candidate.options
        if not parent:
            options |= model_options(candidate.model)
        return Cell("finetune", candidate, seed, (self.tasks[task],), options, self.folder, task, parent, rate)

    def grid(self) -> Iterator[Cell]:
        """The jobs that choose learning rates, the same number for every model."""
        for task in self.tasks:
            for candidate in self.doing(task):
                for rate in self.config.learning_rates:
                    yield self.finetuning(task, candidate, 1, rate)

    def cells(self) -> Iterator[Cell]:
        """Every fine-tuning job, at the learning rate that was best for the first seed where a grid is tried."""
        for task in self.tasks:
            for candidate in self.doing(task):
                rate = self.best_rate(task, candidate)
                for seed in self.seeds:
                    yield self.finetuning(task, candidate, seed, rate)

    def best_rate(self, task: str, candidate: Candidate) -> float | None:
        """The rate that validates best; none before all were tried, the same budget for every model."""
        tried = [self.finetuning(task, candidate, 1, rate) for rate in self.config.learning_rates]
        if not all(cell.run.finished or cell.given_up.is_file() for cell in tried):
            return None
        scores = {cell.rate: meta["metrics"]["val/" + metric_of(meta)] for cell in tried if (meta := meta_of(cell))}
        return max(scores, key=lambda rate: scores[rate], default=None)

    def jobs(self) -> list[Cell]:
        """Every job once: the first seed at the best rate is one of the grid."""
        cells = [cell for cell in self.cells() if cell.rate or cell.seed > 1 or not self.config.learning_rates]
        return list({cell.folder: cell for cell in (*self.pretraining(), *self.grid(), *cells)}.values())

    def is_mine(self, cell: Cell) -> bool:
        """Whether a job is in this part of the study: what needs each other is in the same."""
        part, parts = map(int, self.config.shard.split("/"))
        owners = [name for name, candidate in self.candidates.items() if not candidate.start]
        place = owners.index(cell.candidate.start or cell.candidate.name)
        if not self.config.learning_rates:
            place += len(owners) * (cell.seed - 1)
        return place % parts == part - 1


def plan_study(config: StudyConfig) -> Study:
    """Solve for the sizes, check every job's settings and the room on the disk, before anything starts."""
    study = Study(config, plan_candidates(config))
    jobs = study.jobs()
    if not jobs:
        raise UserError("tasks: none of these models can do any of them; name other families, variants or tasks")
    for cell in jobs:
        check_model(cell, alike=len({resolve(one.model) for one in study.candidates.values()}) == 1)
    check_disk(study, jobs)
    return study


def check_model(cell: Cell, alike: bool) -> None:
    """Refuse a job whose file says what the study does, or changes the model that was planned and matched."""
    planned = cell.candidate.model
    if getattr(cell.config, "seeds", 1) > 1:
        raise UserError(f"{cell.files[0]}: seeds are the study's; leave them out of a task")
    if not (cell.parent or alike) and cell.stage == "finetune" and cell.config.init_from:
        raise UserError(f"{cell.files[0]}: with init_from all models of the study would be the same one; leave it out")
    if not cell.parent and resolve(cell.config.model) != resolve(planned):
        own = [f"model.{key}" for key, value in asdict(cell.config.model).items() if value != getattr(planned, key)]
        raise UserError(
            f"{cell.files[0]}: the study plans its models without {', '.join(own)}; move it to task_options"
        )


def check_disk(study: Study, jobs: list[Cell]) -> None:
    """Refuse to start what would fill the disk."""
    folder = study.folder.resolve()
    place = next(one for one in (folder, *folder.parents) if one.exists())
    needed, free = disk_bytes(jobs), shutil.disk_usage(place).free
    if needed > free:
        raise UserError(
            f"{study.folder}: the study needs about {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB of the disk are "
            "free; free some, or choose a run_dir on another"
        )


def disk_bytes(jobs: list[Cell]) -> int:
    """What the jobs to be done leave behind, and the checkpoints of one of them, which go when it is finished."""
    waiting = [cell for cell in jobs if not cell.run.finished]
    sizes = [cell.candidate.cost.all_parameters for cell in waiting]
    saved = [max(cell.config.trainer.keep, getattr(cell.config, "average", 0)) + 2 for cell in waiting]
    return KEPT_BYTES * sum(sizes) + SAVED_BYTES * max(map(int.__mul__, sizes, saved), default=0)


def model_options(model: ModelConfig) -> dict[str, str]:
    """A model's settings as options of a command, those left open left out."""
    return {f"model.{key}": typed(value) for key, value in asdict(model).items() if value is not None}


def print_plan(study: Study) -> None:
    """Print what each model gets under all measures, and how many jobs there are."""
    config = study.config
    warn_of_distance(study.candidates)
    title = f"Matched by {config.match}, at equal raw tokens" if config.families else "Models, not matched"
    print_table(title, *plan_rows(study.candidates, bool(config.pretrain)))
    for name in config.skip:
        note(f"{name} is left out; --skip '[]' does all tasks")
    jobs = study.jobs()
    done = sum(cell.run.finished for cell in jobs)
    note(
        f"{len(jobs)} jobs, {done} finished: {len([*study.pretraining()])} of pretraining, the rest of fine-tuning; "
        f"about {disk_bytes(jobs) / 1e9:.1f} GB of disk"
    )


def run_study(study: Study) -> list[str]:
    """Do every job of this part that is not finished; one that fails is reported and does not stop the others."""
    write_text(study.folder / "config.yaml", to_yaml(study.config))
    write_plan(study.folder, study.candidates)
    failed: list[str] = []
    for stage in (study.pretraining, study.grid, study.cells):
        for cell in stage():
            if not study.is_mine(cell) or cell.run.finished or cell.given_up.is_file():
                continue
            if stage == study.cells and study.config.learning_rates and cell.rate is None:
                failed.append(f"{cell.name}: its learning rates are not all tried, or none got to the end")
            elif cell.parent and not cell.parent.run.finished:
                failed.append(f"{cell.name}: its pretraining is not finished")
            elif (code := run_cell(cell)) and stage == study.grid and cell.run.diverged.is_file():
                write_json(cell.given_up, {"learning_rate": cell.rate})
                note(f"{cell.name}: diverged, so another rate is taken; to try it again, delete {cell.given_up}")
            elif code:
                failed.append(f"{cell.name}: ended with exit code {code}; to see why: {cell.line}")
    return failed


def run_cell(cell: Cell) -> int:
    """Do one job; when it is finished its checkpoints go, since its bundle is all that others need."""
    note(f"$ {cell.line}")
    code = run_command(cell.command, prepared=cell.config.trainer.processes == 1)
    if cell.run.finished:
        shutil.rmtree(cell.folder / CHECKPOINTS, ignore_errors=True)
    if code == STOPPED:
        raise Stopped
    return 0 if cell.run.finished else code or 1
