"""What can be set about tracking. Light: no wandb."""

from dataclasses import dataclass, field
from typing import Literal

from pipeline.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Weights & Biases: where a run is recorded, and how often it shows samples."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto is WANDB_MODE if set, else online with a key (WANDB_API_KEY or `wandb login`), else offline."""
    project: str = "triptych"
    """The project at W&B."""
    entity: str | None = None
    """The team or user at W&B; the key's own by default."""
    group: str | None = None
    """Runs of one group are shown together."""
    name: str | None = None
    """The run's name; made from the family, the size and the stage by default."""
    tags: list[str] = field(default_factory=list)
    """Words to filter runs by."""
    samples_every: int = 500
    """Steps between samples of text; 0 is never."""
    attention_every: int = 0
    """Steps between attention maps; 0 is never."""

    def __post_init__(self) -> None:
        if min(self.samples_every, self.attention_every) < 0:
            raise UserError("tracking.samples_every and tracking.attention_every count steps; 0 is never")
