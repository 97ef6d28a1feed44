"""Norms, the feed-forward layer, and the block that all families are made of."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model.attention import Attention, LayerCache, Visible
from pipeline.model.config import Activation, Architecture
from pipeline.model.fast import RMSNorm, dropped, squared_relu
from pipeline.model.positions import Rotation
from pipeline.model.products import Linear

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu_squared": squared_relu,
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def make_norm(model: Architecture) -> nn.Module:
    """The norm that a model asks for."""
    if model.norm == "rms":
        return RMSNorm(model.width, model.norm_epsilon)
    return nn.LayerNorm(model.width, model.norm_epsilon, bias=model.bias)


class FeedForward(nn.Module):
    """Widen, activate (with a gate in the -glu kinds), narrow."""

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        self.gated = "glu" in model.activation
        self.activation = model.activation
        self.input = Linear(model.width, model.feed_forward * (2 if self.gated else 1), bias=model.bias)
        self.output = Linear(model.feed_forward, model.width, bias=model.bias)
        self.dropout = model.activation_dropout

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.output(dropped(self.widen(x_BTC), self.dropout, self.training))

    def widen(self, x_BTC: Tensor) -> Tensor:
        """What is inside, activated."""
        inner, activate = self.input(x_BTC), ACTIVATIONS[self.activation]
        if not self.gated:
            return activate(inner)
        gate, value = inner.chunk(2, dim=-1)
        return activate(gate) * value


class Residual(nn.Module):
    """A layer beside the residual stream, with its norm before, after, or on both sides."""

    def __init__(self, model: Architecture, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.place = model.norm_place
        self.norm = make_norm(model)
        self.result_norm = make_norm(model) if model.norm_place == "both" else None
        self.dropout = model.dropout

    def forward(self, x_BTC: Tensor, *arguments: object) -> Tensor:
        result_BTC = self.layer(x_BTC if self.place == "post" else self.norm(x_BTC), *arguments)
        if self.result_norm is not None:
            result_BTC = self.result_norm(result_BTC)
        x_BTC = x_BTC + dropped(result_BTC, self.dropout, self.training)
        return self.norm(x_BTC) if self.place == "post" else x_BTC


class Block(nn.Module):
    """Attention to oneself, attention to a context in a decoder that has one, and the feed-forward layer."""

    def __init__(self, model: Architecture, causal: bool, cross: bool) -> None:
        super().__init__()
        self.attention = Residual(model, Attention(model, causal=causal))
        self.cross = Residual(model, Attention(model, cross=True)) if cross else None
        self.feed_forward = Residual(model, FeedForward(model))

    def forward(
        self,
        x_BTC: Tensor,
        seen: Visible,
        positions: Rotation | None,
        bias_HTS: Tensor | None,
        context_BSC: Tensor | None = None,
        context_seen: Visible | None = None,
        cache: tuple[LayerCache, LayerCache] | None = None,
    ) -> Tensor:
        """`cache` is of its own tokens, and of the context."""
        own_cache, context_cache = cache or (None, None)
        x_BTC = self.attention(x_BTC, seen, None, positions, bias_HTS, own_cache)
        if self.cross is not None:
            x_BTC = self.cross(x_BTC, context_seen, context_BSC, None, None, context_cache)
        return self.feed_forward(x_BTC)
