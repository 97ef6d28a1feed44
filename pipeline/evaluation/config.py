"""What can be set about a study. Light: imported by the command line, never torch."""

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pipeline.errors import UserError
from pipeline.model.config import Size

StudyFamily = Literal["encoder", "decoder", "encoder-decoder"]
Rule = Literal["parameters", "flops", "tokens"]
STUDY_KEYS = ("match", "start", "against")  # of a variant; all its other keys are settings of training


def typed(value: object) -> str:
    """A value of a setting as one would type it."""
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True)
class Variant:
    """A model of a study as it is asked for."""

    match: Rule | None = None
    """What is made equal to the decoder of its size; None: nothing, it is as large as its options say."""
    start: str | None = None
    """The model whose pretraining its tasks start from, instead of one of its own."""
    against: tuple[str, ...] = ()
    """Which others it is compared with; with none it is shown beside them, outside the verdicts."""
    options: dict[str, str] = field(default_factory=dict)
    """Settings of its first training that differ."""


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """Compare families fairly: pretrain each at a matched budget, fine-tune on tasks, over seeds, say what differs."""

    question: str | None = None
    """What the study asks, as the title of its page."""
    families: list[StudyFamily] = field(default_factory=lambda: ["encoder", "decoder", "encoder-decoder"])
    """The families to compare, every pair of them."""
    variants: dict[str, dict[str, str | int | float | bool | list[str]]] = field(default_factory=dict)
    """More models by name, each with the settings of its first training that differ, such as {model.family: recurrent,
    model.alignment: dot}, and optionally `match` (without it the model is not matched), `against: [NAMES]` to be
    compared with, and `start: NAME` of the model whose pretraining it takes."""
    size: Size = "mini"
    """The size of the decoder, which the others are matched to."""
    match: Rule = "parameters"
    """What is made equal beside the raw tokens: parameters of the blocks, FLOPs of training, or nothing else."""
    seeds: int = 3
    """How many times everything is done; fewer than three show little."""
    pretrain: list[str] = field(default_factory=list)
    """Config files of pretraining, without family, size and run folder; none trains the tasks from scratch."""
    pretrain_options: dict[str, str] = field(default_factory=dict)
    """Settings on top of these files, such as {trainer.max_steps: "500"}."""
    tasks: list[str] = field(default_factory=list)
    """Config files of fine-tuning, one a task; a family that cannot do a task is left out of it."""
    skip: list[str] = field(default_factory=list)
    """Names of tasks above to leave out, such as [retrieval]; [] does all."""
    task_options: dict[str, str] = field(default_factory=dict)
    """Settings on top of every task's file."""
    learning_rates: list[float] = field(default_factory=list)
    """Rates to try for each cell with its first seed; the best on validation is taken for all. None: as in the file."""
    run_dir: str = "studies/study"
    """The folder of the study; a study that was stopped goes on."""
    shard: str = "1/1"
    """Do only this part of the jobs, such as 2/4, to split a study over machines; no part waits for another."""
    dry_run: bool = False
    """Print the plan with the time it would take here, from a few real steps of every shape, and stop."""

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise UserError(f"seeds: {self.seeds} must be at least 1")
        if len(set(self.families)) < len(self.families) or not (self.families or self.variants):
            raise UserError("families: name each family once, and at least one, or variants")
        if not self.tasks and not self.pretrain:
            raise UserError("tasks: a study needs tasks, or pretrain, or both")
        part, _, parts = self.shard.partition("/")
        if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
            raise UserError(f"shard: {self.shard!r} must be like 2/4")
        if any(not 0 < rate < 1 for rate in self.learning_rates):
            raise UserError("learning_rates: must be above 0 and below 1")
        models = self.models()
        if not self.pretrain and any(one.match == "flops" for one in models.values()):
            raise UserError("match: flops are those of pretraining; without it match parameters, or tokens")
        for name in self.variants:
            variant = models[name]
            if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or name in self.families:
                raise UserError(f"variants: {name!r} must be a new name of letters, digits, dots and dashes")
            if variant.match not in (None, *get_args(Rule)):
                raise UserError(f"variants: {name}.match must be one of {', '.join(get_args(Rule))}")
            if unknown := [other for other in (*variant.against, variant.start or name) if other not in models]:
                raise UserError(f"variants: {name} names {unknown[0]!r}, which is no model of this study")
            if variant.start and (not self.pretrain or models[variant.start].start):
                raise UserError(f"variants: {name} starts from {variant.start}, which has no pretraining of its own")
            if variant.start and variant.match:
                raise UserError(f"variants: {name} is as large as {variant.start}, its start; leave out its match")

    def models(self) -> dict[str, Variant]:
        """The families, each compared with all others, and the variants."""
        families: tuple[str, ...] = tuple(self.families)
        found = {name: Variant(self.match, None, families, {"model.family": name}) for name in families}
        for name, given in self.variants.items():
            told: Any = {key: given[key] for key in ("match", "start") if key in given}
            against = given.get("against", [])
            names = tuple(against) if isinstance(against, list) else (str(against),)
            options = {key: typed(value) for key, value in given.items() if key not in STUDY_KEYS}
            found[name] = Variant(**told, against=names, options=options)
        return found
