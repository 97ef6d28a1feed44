"""What can be set about a study. Light: imported by the command line, never torch."""

from dataclasses import dataclass, field
from typing import Literal

from pipeline.errors import UserError
from pipeline.model.config import Size

StudyFamily = Literal["encoder", "decoder", "encoder-decoder"]


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """Compare families fairly: pretrain each at a matched budget, fine-tune on tasks, over seeds, say what differs."""

    families: list[StudyFamily] = field(default_factory=lambda: ["encoder", "decoder", "encoder-decoder"])
    """The families to compare."""
    size: Size = "mini"
    """The size of the decoder, which the others are matched to."""
    match: Literal["parameters", "flops", "tokens"] = "parameters"
    """What is made equal beside the raw tokens: parameters of the blocks, FLOPs of training, or nothing else."""
    seeds: int = 3
    """How many times everything is done; fewer than three show little."""
    pretrain: list[str] = field(default_factory=list)
    """Config files of pretraining, without family, size and run folder; none trains the tasks from scratch."""
    pretrain_options: dict[str, str] = field(default_factory=dict)
    """Settings on top of these files, such as {trainer.max_steps: "500"}."""
    tasks: list[str] = field(default_factory=list)
    """Config files of fine-tuning, one a task; a family that cannot do a task is left out of it."""
    task_options: dict[str, str] = field(default_factory=dict)
    """Settings on top of every task's file."""
    learning_rates: list[float] = field(default_factory=list)
    """Rates to try for each cell with its first seed; the best on validation is taken for all. None: as in the file."""
    run_dir: str = "studies/study"
    """The folder of the study; a study that was stopped goes on."""
    shard: str = "1/1"
    """Do only this part of the cells, such as 2/4, to split a study over machines that share the folder."""
    dry_run: bool = False
    """Print the plan and stop."""

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise UserError(f"seeds: {self.seeds} must be at least 1")
        if len(set(self.families)) < len(self.families) or not self.families:
            raise UserError("families: name each family once, and at least one")
        if not self.tasks and not self.pretrain:
            raise UserError("tasks: a study needs tasks, or pretrain, or both")
        part, _, parts = self.shard.partition("/")
        if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
            raise UserError(f"shard: {self.shard!r} must be like 2/4")
        if any(not 0 < rate < 1 for rate in self.learning_rates):
            raise UserError("learning_rates: must be above 0 and below 1")
