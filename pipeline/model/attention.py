"""The only attention: for all families a mask, a wire and a kind.

Shapes: B batch, H heads, K key-value heads, T queries, S keys, R rank, C width, D head width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.model.config import Architecture
from pipeline.model.fast import RMSNorm, attend, repeated
from pipeline.model.positions import Rotation, check_length
from pipeline.model.products import Linear


@dataclass(frozen=True)
class Visible:
    """Which keys each query may see."""

    allowed: Tensor | None = None
    """True where it may; broadcasts to (B, H, T, S). None is everywhere."""
    causal: bool = False
    """Only keys that are not later, and nothing else is restricted: SDPA needs no mask for that."""
    real_BS: Tensor | None = None
    """Keys that are no padding, for attention that has no scores to mask."""


def visible(
    queries: Tensor,
    keys: Tensor,
    causal: bool,
    real_BS: Tensor | None = None,
    prefix_B: Tensor | None = None,
    documents: tuple[Tensor, Tensor] | None = None,
    window: int = 0,
    bias: bool = False,
    own_BTS: Tensor | None = None,
) -> Visible:
    """Combine every restriction; `queries` and `keys` are the indices at which they stand.

    `own_BTS` is true where a key is of a query's own past, for queries that are alternatives to each other.

    SDPA's own causal path is kept for causal attention alone. Padding alone is a mask of one row a sequence. Anything
    else takes one mask for all heads, and one a sequence only where sequences differ.
    """
    if causal and not window and real_BS is None and prefix_B is None and documents is None and own_BTS is None:
        if len(queries) == 1:
            return Visible()  # the newest token sees all before it
        if len(queries) == len(keys) and not bias:
            return Visible(causal=True)
    allowed: Tensor | None = None
    if causal:
        allowed = (keys[None, :] <= queries[:, None])[None, None]
    if prefix_B is not None:
        inside = keys < prefix_B[:, None]
        allowed = inside[:, None, None, :] if allowed is None else allowed | inside[:, None, None, :]
    if window:
        allowed = both(allowed, ((keys[None, :] - queries[:, None]).abs() <= window)[None, None])
    if documents is not None:
        allowed = both(allowed, (documents[0][:, :, None] == documents[1][:, None, :])[:, None])
    if real_BS is not None:
        allowed = both(allowed, real_BS[:, None, None, :])
    if own_BTS is not None:
        allowed = both(allowed, own_BTS[:, None])
    return Visible(allowed, real_BS=real_BS)


def both(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one & other


class Attention(nn.Module):
    """Queries of `x` attend to keys and values of `x` itself, or of a context."""

    def __init__(self, model: Architecture, cross: bool = False, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = model.heads, model.kv_heads, model.head_width
        self.kind = "dot" if causal and model.attention == "low_rank" else model.attention
        self.scale = 1 / math.sqrt(model.head_width) if model.attention_scale else 1.0
        self.softmax = model.attention_normalise == "softmax" or self.kind != "low_rank"
        self.dropout = model.attention_dropout
        self.cross = cross
        self.query = Linear(model.width, model.heads * model.head_width, bias=model.bias)
        self.key_value = Linear(model.width, 2 * model.kv_heads * model.head_width, bias=model.bias)
        self.output = Linear(model.heads * model.head_width, model.width, bias=model.bias)
        self.query_norm = RMSNorm(model.head_width, model.norm_epsilon) if model.qk_norm else None
        self.key_norm = RMSNorm(model.head_width, model.norm_epsilon) if model.qk_norm else None
        if self.kind == "low_rank":
            self.key_mixer = nn.Parameter(torch.empty(model.attention_rank, model.max_positions))
            self.value_mixer = nn.Parameter(torch.empty(model.attention_rank, model.max_positions))

    def forward(
        self,
        x_BTC: Tensor,
        seen: Visible,
        context_BSC: Tensor | None = None,
        positions: Rotation | None = None,
        bias_HTS: Tensor | None = None,
        cache: "LayerCache | None" = None,
    ) -> Tensor:
        """Attend on the fastest path that the settings allow."""
        q, k, v = self.project(x_BTC, seen, context_BSC, positions, cache)
        if self.softmax and self.kind != "argmax":
            mask = None if self.kind == "low_rank" else score_mask(seen, bias_HTS, q)
            dropout = self.dropout if self.training else 0.0
            out = attend(q, k, v, mask, dropout, seen.causal, self.scale)
        else:
            out = self.weights(q, k, seen, bias_HTS) @ repeated(v, self.heads // self.kv_heads)
        return self.output(out.transpose(1, 2).flatten(2))

    def probabilities(
        self,
        x_BTC: Tensor,
        seen: Visible,
        context_BSC: Tensor | None = None,
        positions: Rotation | None = None,
        bias_HTS: Tensor | None = None,
        cache: "LayerCache | None" = None,
    ) -> Tensor:
        """The exact weights (B, H, T, S) that `forward` with the same arguments gives to the values."""
        q, k, _ = self.project(x_BTC, seen, context_BSC, positions, cache)
        return self.weights(q, k, seen, bias_HTS)

    def project(
        self,
        x_BTC: Tensor,
        seen: Visible,
        context_BSC: Tensor | None,
        positions: Rotation | None,
        cache: "LayerCache | None",
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each head by itself; keys and values of a cache where there is one."""
        q, both = self.projections(x_BTC) if context_BSC is None else (self.query(x_BTC), None)
        q_BTHD = q.unflatten(-1, (self.heads, -1))
        q_BHTD = (q_BTHD if self.query_norm is None else self.query_norm(q_BTHD)).transpose(1, 2)
        if positions is not None:
            q_BHTD = positions.rotate(q_BHTD)
        if both is None:
            if cache and cache.keys is not None and cache.values is not None:
                return q_BHTD, cache.keys, cache.values
            both = self.key_value(context_BSC)
        k, v = both.unflatten(-1, (2 * self.kv_heads, -1)).chunk(2, dim=2)
        k, v = (k if self.key_norm is None else self.key_norm(k)).transpose(1, 2), v.transpose(1, 2)
        if positions is not None:
            k = positions.rotate(k)
        if self.kind == "low_rank":
            k, v = mixed(k, self.key_mixer, seen.real_BS), mixed(v, self.value_mixer, seen.real_BS)
        if cache:
            k, v = cache.keep(k, v) if self.cross else cache.append(k, v)
        return q_BHTD, k, v

    def projections(self, x_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, and keys and values, of the same states."""
        return self.query(x_BTC), self.key_value(x_BTC)

    def weights(self, q: Tensor, k: Tensor, seen: Visible, bias_HTS: Tensor | None) -> Tensor:
        scores_BHTS = q @ repeated(k, self.heads // self.kv_heads).transpose(-1, -2) * self.scale
        if self.kind == "low_rank":
            return scores_BHTS.softmax(-1) if self.softmax else scores_BHTS
        if seen.causal:
            seen = Visible(torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool, device=q.device).tril())
        mask = score_mask(seen, bias_HTS, q)
        if mask is not None and mask.dtype == torch.bool:
            scores_BHTS = scores_BHTS.masked_fill(~mask, -math.inf)
        elif mask is not None:
            scores_BHTS = scores_BHTS + mask
        soft = torch.nan_to_num(scores_BHTS.softmax(-1))  # a row that sees nothing is zeros, as in SDPA
        if self.kind != "argmax":
            return soft
        hard = torch.zeros_like(soft).scatter(-1, scores_BHTS.argmax(-1, keepdim=True), 1.0) * (soft > 0).any(-1, True)
        return hard + (soft - soft.detach()) if self.training else hard  # straight through, so that it can learn


def score_mask(seen: Visible, bias_HTS: Tensor | None, like: Tensor) -> Tensor | None:
    """What SDPA takes as its mask: nothing, booleans, or numbers to add."""
    if bias_HTS is None:
        return seen.allowed
    bias = bias_HTS[None].to(like.dtype)
    return bias if seen.allowed is None else bias.masked_fill(~seen.allowed, -math.inf)


def mixed(x_BKSD: Tensor, mixer_RS: Tensor, real_BS: Tensor | None) -> Tensor:
    """Project a sequence of any length to a few rows (Wang et al. 2020), padding counting as nothing."""
    check_length(x_BKSD.shape[2], mixer_RS.shape[1])
    if real_BS is not None:
        x_BKSD = x_BKSD * real_BS[:, None, :, None]
    return mixer_RS[:, : x_BKSD.shape[2]] @ x_BKSD


class LayerCache:
    """The keys and values of one attention, in memory allocated once."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, k_BKSD: Tensor, v_BKSD: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens and return all."""
        if self.keys is None or self.values is None:
            batch, heads, _, width = k_BKSD.shape
            self.keys = k_BKSD.new_empty(batch, heads, self.capacity, width)
            self.values = v_BKSD.new_empty(batch, heads, self.capacity, width)
        new = k_BKSD.shape[2]
        self.keys.narrow(2, self.length, new).copy_(k_BKSD)  # quicker than slicing, and done for every token
        self.values.narrow(2, self.length, new).copy_(v_BKSD)
        self.length += new
        return self.keys.narrow(2, 0, self.length), self.values.narrow(2, 0, self.length)

    def keep(self, k_BKSD: Tensor, v_BKSD: Tensor) -> tuple[Tensor, Tensor]:
        """Remember keys and values that will not change."""
        self.keys, self.values = k_BKSD.contiguous(), v_BKSD.contiguous()  # they are read many times
        return self.keys, self.values

    def keep_only(self, kept_BS: Tensor) -> None:
        """Forget all tokens of each row but these."""
        assert self.keys is not None and self.values is not None
        batch, heads, capacity, width = self.keys.shape
        first_BK1 = torch.arange(0, batch * heads * capacity, capacity, device=kept_BS.device).view(batch, heads, 1)
        places_BKS = first_BK1 + kept_BS[:, None]  # whole rows are copied, which is quicker than gathering numbers
        self.length = kept_BS.shape[1]
        for x_BKSD in (self.keys, self.values):
            x_BKSD.narrow(2, 0, self.length).copy_(x_BKSD.view(-1, width)[places_BKS])

    def reorder(self, rows: Tensor) -> None:
        """Let row i go on from what row `rows[i]` has seen."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)


def attention_probabilities(model: nn.Module, run: Callable[[], Any]) -> dict[str, Tensor]:
    """Run a model and return the exact probabilities of every attention in it, by name; its fast path stays."""
    found: dict[str, Tensor] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Tensor) -> None:
            found[name] = module.probabilities(*args, **kwargs).detach()

        return hook

    modules = {name: module for name, module in model.named_modules() if hasattr(module, "probabilities")}
    handles = [module.register_forward_hook(record(name), with_kwargs=True) for name, module in modules.items()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found
