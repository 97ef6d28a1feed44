"""A study: families × tasks × seeds at a matched budget, cell by cell, each a job that goes on if it was stopped."""

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from pipeline.configuration import build, to_yaml
from pipeline.data.config import OBJECTIVES
from pipeline.data.tasks import TASKS
from pipeline.errors import Stopped, UserError
from pipeline.evaluation.config import StudyConfig
from pipeline.evaluation.matching import WITHIN, Cost, cost_of, matched, value
from pipeline.files import read_json, write_json, write_text
from pipeline.model.config import ModelConfig, resolve
from pipeline.terminal import note, print_table, warn
from pipeline.training.config import FinetuneConfig, PretrainConfig
from pipeline.training.run import NOT_COMPARED, Run, flat

PLAN = "plan.json"


@dataclass(frozen=True)
class Cell:
    """One job of a study."""

    stage: str
    family: str
    seed: int
    folder: Path
    files: tuple[str, ...]
    options: dict[str, str]
    task: str = ""
    parent: Path | None = None
    """The pretraining run that it starts from."""
    rate: float | None = None
    """The learning rate, where a grid is tried."""

    @property
    def run(self) -> Run:
        return Run(self.folder)

    @property
    def command(self) -> list[str]:
        """What a user would type."""
        files = [word for file in self.files for word in ("--config", file)]
        return [self.stage, *files, *(word for key, value in self.given.items() for word in (f"--{key}", value))]

    @property
    def given(self) -> dict[str, str]:
        """The settings on top of the files."""
        given = self.options | {"seed": str(self.seed), "run_dir": str(self.folder)}
        if self.parent:
            given["init_from"] = str(self.parent / "bundle")
        if self.rate is not None:
            given["optim.lr"] = str(self.rate)
        return given


@dataclass(frozen=True)
class Study:
    """A study with its plan made: what each family gets, and every job."""

    config: StudyConfig
    models: dict[str, ModelConfig]
    costs: dict[str, Cost]

    @property
    def folder(self) -> Path:
        return Path(self.config.run_dir)

    @cached_property
    def tasks(self) -> dict[str, str]:
        """The file of each task."""
        return {Path(file).stem: file for file in self.config.tasks}

    def families_for(self, file: str) -> list[str]:
        """The families that can do a task; an encoder as half of an encoder-decoder would not be matched."""
        task = build(FinetuneConfig, [Path(file)], self.config.task_options).task
        return [family for family in self.config.families if family in TASKS[task.name].families]

    def pretraining(self) -> Iterator[Cell]:
        """The pretraining jobs, shared by all tasks."""
        for seed in range(1, self.config.seeds + 1) if self.config.pretrain else ():
            for family in self.config.families:
                yield self.pretrain_cell(family, seed)

    def pretrain_cell(self, family: str, seed: int) -> Cell:
        folder = self.folder / "pretrain" / f"{family}-{seed}"
        options = model_options(self.models[family]) | self.config.pretrain_options | self.group("pretrain")
        return Cell("pretrain", family, seed, folder, tuple(self.config.pretrain), options)

    def finetuning(self, task: str, family: str, seed: int, rate: float | None = None) -> Cell:
        """One fine-tuning job."""
        folder = self.folder / task / f"{family}-{seed}"
        if rate is not None:
            folder = folder.with_name(f"{folder.name}-lr{rate:g}")
        parent = self.pretrain_cell(family, seed).folder if self.config.pretrain else None
        options = {} if parent else model_options(self.models[family])
        options |= self.config.task_options | self.group("finetune")
        return Cell("finetune", family, seed, folder, (self.tasks[task],), options, task, parent, rate)

    def group(self, stage: str) -> dict[str, str]:
        return {"tracking.group": self.folder.name, "tracking.tags": json.dumps([stage, self.config.match])}

    def cells(self) -> Iterator[Cell]:
        """Every fine-tuning job, at the learning rate that was best for the first seed where a grid is tried."""
        for task, file in self.tasks.items():
            for family in self.families_for(file):
                for seed in range(1, self.config.seeds + 1):
                    yield self.finetuning(task, family, seed, self.best_rate(task, family))

    def grid(self) -> Iterator[Cell]:
        """The jobs that choose learning rates, the same number for every family."""
        for task, file in self.tasks.items():
            for family in self.families_for(file):
                for rate in self.config.learning_rates:
                    yield self.finetuning(task, family, 1, rate)

    def best_rate(self, task: str, family: str) -> float | None:
        scores = {}
        for rate in self.config.learning_rates:
            result = result_of(self.finetuning(task, family, 1, rate))
            if result:
                scores[rate] = result["metrics"]["val/" + metric_of(result)]
        complete = len(scores) == len(self.config.learning_rates)  # the same budget for every family
        return max(scores, key=lambda rate: scores[rate]) if scores and complete else None


def plan_study(config: StudyConfig) -> Study:
    """Solve for the sizes and check every job's settings; what was planned once is read back."""
    folder = Path(config.run_dir)
    base = build(PretrainConfig, [Path(file) for file in config.pretrain], planning_options(config))
    window, vocab_size = base.data.sequence_length, base.data.new_tokenizer.vocab_size
    if base.data.tokenizer and (Path(base.data.tokenizer) / "meta.json").is_file():
        vocab_size = read_json(Path(base.data.tokenizer) / "meta.json").get("vocab_size", vocab_size)
    reference = replace(base.model, family="decoder", size=config.size)
    recorded = read_json(folder / PLAN) if (folder / PLAN).is_file() else {}
    models: dict[str, ModelConfig] = {}
    costs: dict[str, Cost] = {}
    for family in config.families:
        objective = replace(base.objective, name=base.objective.name or OBJECTIVES[family][0])
        if family in recorded.get("models", {}):
            model = ModelConfig(**recorded["models"][family])
        else:
            model = matched(reference, family, config.match, vocab_size, window, objective)
        models[family], costs[family] = model, cost_of(resolve(model), vocab_size, window, objective)
    study = Study(config, models, costs)
    if len(study.tasks) < len(config.tasks) or "pretrain" in study.tasks:
        raise UserError("tasks: every file needs a name of its own, and none may be called pretrain")
    if recorded and recorded["match"] != [config.match, config.size]:
        raise UserError(f"{folder}: holds a study with another match or size; choose another run_dir")
    for cell in (*study.pretraining(), *study.grid(), *study.cells()):  # mistakes show before anything starts
        check_cell(cell)
    return study


def planning_options(config: StudyConfig) -> dict[str, str]:
    """What the files of pretraining need to be read for a plan."""
    return {"data.corpus": "[planned]"} | config.pretrain_options if not config.pretrain else config.pretrain_options


def check_cell(cell: Cell) -> None:
    """Build the settings of a job, and refuse a result in its place that was made with others."""
    config_class: type[Any] = PretrainConfig if cell.stage == "pretrain" else FinetuneConfig
    config = build(config_class, [Path(file) for file in cell.files], cell.given)
    before, after = flat(cell.run.settings), flat(yaml.safe_load(to_yaml(config)))
    changed = [key for key in sorted(after) if before and before.get(key) != after[key] and key not in NOT_COMPARED]
    if changed:
        raise UserError(
            f"{cell.folder}: was done with another {', '.join(changed)}; choose another run_dir for the study"
        )


def model_options(model: ModelConfig) -> dict[str, str]:
    """A model's settings as options of a command, those left open left out."""
    return {f"model.{key}": json.dumps(value).strip('"') for key, value in asdict(model).items() if value is not None}


def print_plan(study: Study) -> None:
    """Print what each family gets under all measures, and how many jobs there are."""
    decoder = study.costs.get("decoder") or next(iter(study.costs.values()))
    rows = []
    for family, cost in study.costs.items():
        model = resolve(study.models[family])
        blocks = "+".join(str(count) for count in (model.encoder_layers, model.decoder_layers) if count)
        shape = (f"{model.width} × {blocks}", model.feed_forward)
        parameters = (cost.parameters, cost.parameters / decoder.parameters, cost.all_parameters)
        rows.append((family, *shape, *parameters, f"{cost.flops:.3g}", cost.flops / decoder.flops))
        off = abs(value(cost, study.config.match) / value(decoder, study.config.match) - 1)
        if study.config.match != "tokens" and off > WITHIN:
            warn(f"{family}: no shape is nearer than {off:.1%}; a larger size can be matched more closely")
    header = ("family", "width × blocks", "feed-forward", "block parameters", "ratio", "all", "FLOPs a window", "ratio")
    print_table(f"Matched by {study.config.match}, at equal raw tokens", header, rows)
    jobs = [*study.pretraining(), *study.grid(), *study.cells()]
    done = sum(cell.run.finished for cell in jobs)
    note(f"{len(jobs)} jobs, {done} finished: {len([*study.pretraining()])} of pretraining, the rest of fine-tuning")


def run_study(study: Study) -> list[str]:
    """Do every job that is not finished; one that fails is reported and does not stop the others."""
    folder, config = study.folder, study.config
    write_text(folder / "config.yaml", to_yaml(config))
    models = {family: asdict(model) for family, model in study.models.items()}
    write_json(folder / PLAN, {"match": [config.match, config.size], "models": models})
    failed: list[str] = []
    for stage in (study.pretraining, study.grid, study.cells):
        for number, cell in enumerate(stage()):
            part, parts = map(int, config.shard.split("/"))
            if number % parts != part - 1 or cell.run.finished:
                continue
            if stage == study.cells and config.learning_rates and cell.rate is None:
                failed.append(f"{cell.folder}: its learning rates are not all tried")
                continue
            if cell.parent and not Run(cell.parent).finished:
                failed.append(f"{cell.folder}: its pretraining is not finished")
                continue
            note(f"$ triptych {shlex.join(cell.command)}")
            code = run_command(cell.command)
            if code in (75, -2, -15):
                raise Stopped
            if code != 0 or not cell.run.finished:
                failed.append(f"{cell.folder}: ended with exit code {code}")
    return failed


def run_command(command: list[str]) -> int:
    """Do one job in a process of its own, so that nothing of it stays in memory."""
    process = subprocess.Popen([sys.executable, "-m", "pipeline", *command])
    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.signal(number, lambda told, _: process.send_signal(told)) for number in signals}
    try:  # it saves and leaves, and so do we
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def result_of(cell: Cell) -> dict[str, Any] | None:
    """What a finished job found: its metrics, and the score of every example."""
    if not cell.run.finished:
        return None
    meta: dict[str, Any] = read_json(cell.run.bundle / "meta.json")
    split = "test" if (cell.folder / "test-scores.json").is_file() else "val"
    scores = cell.folder / f"{split}-scores.json"
    return meta | {"split": split, "examples": read_json(scores) if scores.is_file() else []}


def metric_of(result: dict[str, Any]) -> str:
    """The metric that a task is judged by."""
    task: Any = result["task"]["name"]
    return TASKS[task].metric
