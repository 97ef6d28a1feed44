"""How a model knows where a token stands: one slot with three hooks, each doing nothing unless a scheme needs it.

Shapes: B batch, H heads, T queries or tokens, S keys, C width, D head width.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.errors import UserError
from pipeline.model.config import Architecture


class Positions(nn.Module):
    """No positions at all; the base of every scheme."""

    limit: int | None = None
    """The longest sequence, where a scheme has one."""

    def embed(self, x_BTC: Tensor, positions: Tensor) -> Tensor:
        """Tell the embeddings where they stand; `positions` is (T) or, with padding on the left, (B, T)."""
        return x_BTC

    def at(self, positions_T: Tensor) -> "Rotation | None":
        """What turns queries and keys that stand at these positions, made once for all layers."""
        return None

    def biases(self, layers: int, queries: Tensor, keys: Tensor) -> list[Tensor | None]:
        """For each layer what is added to the scores (H, T, S) of queries and keys that stand at these positions."""
        return [None] * layers


class Sinusoidal(Positions):
    """Sines and cosines of growing wavelengths, added to the embedding (Vaswani et al. 2017)."""

    def embed(self, x_BTC: Tensor, positions: Tensor) -> Tensor:
        return x_BTC + sinusoids(positions, x_BTC.shape[-1], x_BTC.dtype)


class Concatenated(Positions):
    """Sines and cosines beside the embedding, so that words meet words and positions positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def embed(self, x_BTC: Tensor, positions: Tensor) -> Tensor:
        table = sinusoids(positions, self.width, x_BTC.dtype)
        return torch.cat([x_BTC, table.expand(*x_BTC.shape[:2], self.width)], dim=-1)


def sinusoids(positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    even = torch.arange(0, width, 2, device=positions.device)
    angles = positions[..., None] * torch.exp(even * (-math.log(10_000.0) / width))
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :width].to(dtype)


class Learned(Positions):
    """A learned vector for each position, up to the end of the table."""

    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        self.limit = positions
        self.table = nn.Embedding(positions, width)

    def embed(self, x_BTC: Tensor, positions: Tensor) -> Tensor:
        return x_BTC + self.table(positions)


def check_length(tokens: int, table: int | None) -> None:
    """A sequence longer than a table is the user's to shorten; reading past it would crash or lie."""
    if table is not None and tokens > table:
        raise UserError(
            f"a sequence of {tokens} tokens, but the model has {table} positions; "
            "shorten data.sequence_length or raise model.max_positions"
        )


class Relative(Positions):
    """A learned bias for each distance, head and layer; those beyond the clip share one (after Shaw et al. 2018)."""

    def __init__(self, layers: int, heads: int, clip: int) -> None:
        super().__init__()
        self.clip = clip
        self.table = nn.Parameter(torch.zeros(layers, heads, 2 * clip + 1))

    def biases(self, layers: int, queries: Tensor, keys: Tensor) -> list[Tensor | None]:
        distance_TS = (keys[None, :] - queries[:, None]).clamp(-self.clip, self.clip) + self.clip
        return [self.table[layer][:, distance_TS] for layer in range(layers)]


class Bucketed(Positions):
    """A learned bias for each bucket of distances and head, shared by all layers (Raffel et al. 2020)."""

    def __init__(self, heads: int, buckets: int, distance: int, bidirectional: bool) -> None:
        super().__init__()
        self.distance = distance
        self.table = nn.Embedding(buckets, heads)
        known = bucket(torch.arange(-distance, distance + 1), buckets, distance, bidirectional)
        self.register_buffer("buckets", known, persistent=False)  # of each distance; those beyond are like the last
        self.buckets: Tensor

    def biases(self, layers: int, queries: Tensor, keys: Tensor) -> list[Tensor | None]:
        distance_TS = (keys[None, :] - queries[:, None]).clamp(-self.distance, self.distance) + self.distance
        # contiguous, since attention reads other orders slowly
        return [self.table(self.buckets[distance_TS]).permute(2, 0, 1).contiguous()] * layers


def bucket(distances: Tensor, buckets: int, furthest: int, bidirectional: bool) -> Tensor:
    """A bucket for each small distance, then growing ones; half of them for what comes later, if that is seen."""
    buckets = buckets // 2 if bidirectional else buckets
    offset = (distances > 0) * (buckets if bidirectional else 0)
    far = distances.abs() if bidirectional else -distances.clamp(max=0)
    exact = buckets // 2
    growth = torch.log(far.clamp(min=1).float() / exact) / math.log(furthest / exact)
    large = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
    return offset + torch.where(far < exact, far, large)


class Rotary(Positions):
    """Queries and keys turned by their position, so that scores depend on the distance (Su et al. 2021)."""

    def __init__(self, base: float, head_width: int) -> None:
        super().__init__()
        self.base, self.head_width = base, head_width

    def at(self, positions_T: Tensor) -> "Rotation":
        even = torch.arange(0, self.head_width, 2, device=positions_T.device)
        angles_TD = (positions_T[:, None] * self.base ** (-even.float() / self.head_width)).repeat(1, 2)
        return Rotation(angles_TD.cos(), angles_TD.sin())


@dataclass(frozen=True)
class Rotation:
    """Rotary positions of some tokens."""

    cos_TD: Tensor
    sin_TD: Tensor

    def rotate(self, x_BHTD: Tensor) -> Tensor:
        """Turn queries or keys."""
        first, second = x_BHTD.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return x_BHTD * self.cos_TD.to(x_BHTD.dtype) + turned * self.sin_TD.to(x_BHTD.dtype)


class Alibi(Positions):
    """A penalty that grows with distance, steeper or flatter by head; nothing is learned (Press et al. 2022)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", alibi_slopes(heads), persistent=False)
        self.slopes: Tensor

    def biases(self, layers: int, queries: Tensor, keys: Tensor) -> list[Tensor | None]:
        distance_TS = (keys[None, :] - queries[:, None]).abs()
        return [-self.slopes[:, None, None] * distance_TS] * layers


def alibi_slopes(heads: int) -> Tensor:
    """A geometric row for a power of two; for other numbers, every other slope of the next row fills up."""
    power = 2 ** math.floor(math.log2(heads))
    row = 2.0 ** (-8 * torch.arange(1, power + 1) / power)
    between = 2.0 ** (-4 * torch.arange(1, 2 * power + 1, 2) / power)
    return torch.cat([row, between[: heads - power]])


def make_positions(model: Architecture, layers: int, causal: bool) -> Positions:
    """The scheme that a model asks for, for one side of it."""
    match model.position:
        case "none":
            return Positions()
        case "sinusoidal":
            return Sinusoidal()
        case "learned":
            return Learned(model.max_positions, model.width)
        case "concatenated":
            return Concatenated(model.position_width)
        case "relative":
            return Relative(layers, model.heads, model.relative_clip)
        case "t5":
            return Bucketed(model.heads, model.position_buckets, model.position_distance, bidirectional=not causal)
        case "rotary":
            return Rotary(model.rotary_base, model.head_width)
        case "alibi":
            return Alibi(model.heads)
