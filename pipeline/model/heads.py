"""What stands on top of a model: the output matrix, a classifier, an embedding."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.model.block import ACTIVATIONS, make_norm
from pipeline.model.config import Architecture

LOSS_CHUNK = 1024  # positions whose logits exist at the same time


class LanguageHead(nn.Module):
    """From states to the logits of the vocabulary, or to the loss without ever holding all logits."""

    def __init__(self, model: Architecture, vocab_size: int) -> None:
        super().__init__()
        self.scale = model.width**-0.5 if model.output_scale else 1.0
        self.cap = model.logit_soft_cap
        self.transform: nn.Module = nn.Identity()
        if model.head_transform:
            self.transform = HeadTransform(model)
        self.output = nn.Linear(model.width, vocab_size, bias=model.output_bias)

    def forward(self, states: Tensor) -> Tensor:
        logits = self.output(self.transform(states) * self.scale)
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    def loss(self, states_PC: Tensor, targets_P: Tensor, smoothing: float = 0.0) -> Tensor:
        """The summed cross entropy of positions, with gradients."""
        if not self.cap and not smoothing and states_PC.dtype == torch.float32:  # what torch computes in chunks
            return F.linear_cross_entropy(
                self.transform(states_PC) * self.scale,
                self.output.weight,
                targets_P,
                linear_bias=self.output.bias,
                reduction="sum",
                options=nn.LinearCrossEntropyOptions(batch_chunk_size=LOSS_CHUNK),
            )
        total = states_PC.new_zeros((), dtype=torch.float32)
        for states, targets in zip(torch.split(states_PC, LOSS_CHUNK), torch.split(targets_P, LOSS_CHUNK), strict=True):
            total = total + checkpoint(self.chunk_loss, states, targets, smoothing, use_reentrant=False)
        return total

    def chunk_loss(self, states_PC: Tensor, targets_P: Tensor, smoothing: float) -> Tensor:
        return F.cross_entropy(self(states_PC).float(), targets_P, reduction="sum", label_smoothing=smoothing)

    @torch.no_grad()
    def losses(self, states_PC: Tensor, targets_P: Tensor) -> Tensor:
        """The cross entropy of each position, for measuring."""
        pairs = zip(torch.split(states_PC, LOSS_CHUNK), torch.split(targets_P, LOSS_CHUNK), strict=True)
        parts = [F.cross_entropy(self(states).float(), targets, reduction="none") for states, targets in pairs]
        return torch.cat(parts) if parts else states_PC.new_zeros(0)


class HeadTransform(nn.Module):
    """The layer that BERT puts before its output matrix."""

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        self.linear = nn.Linear(model.width, model.width)
        self.activate = ACTIVATIONS[model.activation]
        self.norm = make_norm(model)

    def forward(self, states: Tensor) -> Tensor:
        return self.norm(self.activate(self.linear(states)))


Pooling = Literal["mean", "class", "last"]


def pooled(states_BTC: Tensor, real_BT: Tensor | None, pooling: Pooling) -> Tensor:
    """One state for a sequence padded on the right: the mean of its real tokens, its first, or its last real one."""
    if pooling == "class":
        return states_BTC[:, 0]
    if real_BT is None:
        return states_BTC.mean(1) if pooling == "mean" else states_BTC[:, -1]
    count_B = real_BT.sum(1).clamp(min=1)
    if pooling == "last":
        return states_BTC[torch.arange(len(states_BTC), device=states_BTC.device), count_B - 1]
    return (states_BTC * real_BT[..., None]).sum(1) / count_B[:, None]


class ClassificationHead(nn.Module):
    """From one state to the logits of classes."""

    def __init__(self, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(width, classes)
        nn.init.normal_(self.output.weight, std=0.02)
        nn.init.zeros_(self.output.bias)

    def forward(self, state_BC: Tensor) -> Tensor:
        return self.output(self.dropout(state_BC))
