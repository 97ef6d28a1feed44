"""Triptych: raw novels to pretrained, fine-tuned and fairly compared transformers of three families."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.inference import Loaded

__version__ = "0.1.0"


def load(folder: str) -> "Loaded":
    """A bundle ready to use: `.classify([…])`, `.translate([…])`, `.summarize([…])`, `.generate("…")`, `.embed([…])`,
    `.search("…", corpus)`."""
    from pipeline import inference  # here, so that the command line answers before torch is imported

    return inference.load(folder)
