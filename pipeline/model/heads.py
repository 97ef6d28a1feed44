"""What stands on top of a model: the output matrix, a classifier, an embedding."""

import torch
from torch import Tensor, nn

from pipeline.model.block import ACTIVATIONS, make_norm
from pipeline.model.config import Architecture


class LanguageHead(nn.Module):
    """From states to the logits of the vocabulary."""

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


class HeadTransform(nn.Module):
    """The layer that BERT puts before its output matrix."""

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        self.linear = nn.Linear(model.width, model.width)
        self.activate = ACTIVATIONS[model.activation]
        self.norm = make_norm(model)

    def forward(self, states: Tensor) -> Tensor:
        return self.norm(self.activate(self.linear(states)))
