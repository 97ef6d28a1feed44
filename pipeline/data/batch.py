"""Batches: examples side by side, padded on the right to one length.

Shapes: B sequences, S positions of the encoder, T positions of the decoder, or of the encoder where it is alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pipeline.data.objectives import IGNORED, Example
from pipeline.data.shard import Integers

if TYPE_CHECKING:
    from pipeline.bundle import Model


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a model reads and is to predict at once."""

    source_BS: Tensor | None
    """What the encoder reads."""
    source_real_BS: Tensor | None = None
    """Which of it is no padding, if any is."""
    inputs_BT: Tensor | None
    """What the decoder reads."""
    inputs_real_BT: Tensor | None = None
    """Which of it is no padding, if any is."""
    targets_BT: Tensor
    """What each position predicts, or IGNORED."""
    prefix_B: Tensor | None = None
    """So many first positions of each decoder input see each other in both directions, if any do."""
    tokens: int
    """Raw tokens of the windows."""
    samples: int
    loss_positions: int
    """How many positions, or labels, are predicted."""
    labels_B: Tensor | None = None
    """The class of each sequence, or the document of each query, where it has one, or IGNORED."""
    documents: "Batch | None" = None
    """The documents that queries should find, one each."""
    relevant_BB: Tensor | None = None
    """Which of these documents (columns) answer which query (rows)."""

    def states(self, model: "Model") -> Tensor:
        """Run a model: the states of its decoder, or of its encoder if it is alone."""
        memory = None if self.source_BS is None else model.encode(self.source_BS, self.source_real_BS)
        if self.inputs_BT is None:
            assert memory is not None
            return memory.states_BSC
        return model.decode(self.inputs_BT, None, memory, self.prefix_B)  # padding on the right is seen by none

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The same batch on another device."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """The same batch in memory from which copies to a GPU need not be waited for."""
        return self.each(Tensor.pin_memory)

    def each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, documents=self.documents and self.documents.each(change), **changed)


def collate(examples: Sequence[Example], pad: int, like: Example | None = None) -> Batch:
    """Put examples of one family side by side.

    No examples make a batch of weight zero, for ranks without samples: one row of padding in the shape of `like`, with
    nothing to predict. It passes as real, so that no attention has nothing to attend to.
    """
    if not examples:
        assert like is not None, "no examples, and none whose shape to take"
        row = collate([like], pad).each(lambda tensor: torch.full_like(tensor, pad))
        return replace(
            row,
            targets_BT=torch.full_like(row.targets_BT, IGNORED),
            labels_B=None if row.labels_B is None else torch.full_like(row.labels_B, IGNORED),
            prefix_B=None,
            tokens=0,
            samples=0,
            loss_positions=0,
        )
    source_BS, source_real_BS = stack([example.source for example in examples], pad)
    inputs_BT, inputs_real_BT = stack([example.inputs for example in examples], pad)
    targets_BT, _ = stack([example.targets for example in examples], IGNORED)
    assert targets_BT is not None
    prefixes = [example.prefix for example in examples]
    labels = [example.label for example in examples if example.label is not None]
    documents = [example.document for example in examples if example.document is not None]
    relevant = [[document.label in example.relevant for document in documents] for example in examples]
    return Batch(
        source_BS=source_BS,
        source_real_BS=source_real_BS,
        inputs_BT=inputs_BT,
        inputs_real_BT=inputs_real_BT,
        targets_BT=targets_BT,
        prefix_B=torch.tensor(prefixes) if any(prefixes) else None,
        tokens=sum(example.tokens for example in (*examples, *documents)),
        samples=len(examples),
        loss_positions=int((targets_BT != IGNORED).sum()) + sum(label != IGNORED for label in labels),
        labels_B=torch.tensor(labels) if labels else None,
        documents=collate(documents, pad) if documents else None,
        relevant_BB=torch.tensor(relevant) if documents else None,
    )


def stack(rows: Sequence[Integers | None], filler: int) -> tuple[Tensor | None, Tensor | None]:
    """Rows filled up to the longest and, if any was, where something was before; nothing where there are no rows."""
    there = [row for row in rows if row is not None]
    if not there:
        return None, None
    assert len(there) == len(rows), "examples of different families in one batch"
    lengths = np.array([len(row) for row in there])
    real = np.arange(lengths.max()) < lengths[:, None]
    filled = np.full(real.shape, filler, np.int64)
    filled[real] = np.concatenate(there)
    return torch.from_numpy(filled), None if real.all() else torch.from_numpy(real)
