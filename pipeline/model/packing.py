"""Weights laid out for products of few rows, while a model writes.

Such a product takes as long as reading its weights does, and MKL reads them in an order slow on some processors.

Shapes: R rows, I inputs, O outputs, P parts of the outputs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipeline.model.attention import Attention
from pipeline.model.block import FeedForward
from pipeline.model.products import onednn_linear

PARTS_PER_THREAD = 2  # measured: faster than one
LEAST_OUTPUTS = 16  # of a part: float32 numbers in a cache line


Product = Callable[[Tensor], Tensor]
FUSED = {"relu": ("relu", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh")}  # oneDNN's names


@contextmanager
def packed(*modules: nn.Module, rows: int) -> Iterator[None]:
    """Make products of about so many rows fast on a CPU, with a copy of the weights; afterwards all is as before."""
    parts = [part for module in modules for part in module.modules()]
    try:
        if next(modules[0].parameters()).device.type == "cpu" and not torch.is_autocast_enabled("cpu"):
            lay_out(parts, rows)
        yield
    finally:
        for part in parts:
            for name in ("forward", "projections", "widen"):
                vars(part).pop(name, None)


def lay_out(parts: Sequence[nn.Module], rows: int) -> None:
    done: set[nn.Module] = set()  # layers inside of a larger product
    for part in parts:  # a module comes before what it holds
        if type(part) is Attention and not part.cross:
            vars(part)["projections"] = in_one_product(part, rows)
            done |= {part.query, part.key_value}
        elif type(part) is FeedForward and part.activation in FUSED and blocked(part.input.weight, rows):
            vars(part)["widen"] = by_blocks(part.input.weight, part.input.bias, rows, *FUSED[part.activation])
            done.add(part.input)
        elif isinstance(part, nn.Linear) and part not in done:
            vars(part)["forward"] = product(part.weight, part.bias, rows)


def in_one_product(attention: Attention, rows: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Queries, keys and values of the same states."""
    layers = (attention.query, attention.key_value)
    bias = None if attention.query.bias is None else torch.cat([layer.bias for layer in layers])
    together = product(torch.cat([layer.weight for layer in layers]), bias, rows)
    widths = [layer.out_features for layer in layers]
    return lambda x: torch.split(together(x), widths, -1)


def product(weight_OI: Tensor, bias_O: Tensor | None, rows: int) -> Product:
    """The product of a layer, in the layout that is fast for so many rows."""
    return by_blocks(weight_OI, bias_O, rows) if blocked(weight_OI, rows) else by_parts(weight_OI, bias_O)


def blocked(weight_OI: Tensor, rows: int) -> bool:
    """Whether oneDNN is there and quicker than a batch of products, which a single row is not."""
    return rows > 1 and weight_OI.dtype == torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def by_blocks(weight_OI: Tensor, bias_O: Tensor | None, rows: int, activation: str = "none", kind: str = "") -> Product:
    """oneDNN's product, which reads weights in blocks of its own order and activates what it has just computed."""
    weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), rows)
    return lambda x: onednn_linear(x, weight, bias_O, activation, kind)


def by_parts(weight_OI: Tensor, bias_O: Tensor | None) -> Product:
    """The product of a layer as a batch of products, each of a part of the outputs.

    MKL reads the weights of a single row with one core only; of a batch, every core takes its share in good order.
    """
    outputs, inputs = weight_OI.shape
    parts = math.gcd(outputs, min(max(1, outputs // LEAST_OUTPUTS), PARTS_PER_THREAD * torch.get_num_threads()))
    weight_PIO = weight_OI.reshape(parts, -1, inputs).mT.contiguous()
    bias_P1O = (weight_OI.new_zeros(outputs) if bias_O is None else bias_O).view(parts, 1, -1)

    def joined(x: Tensor) -> Tensor:
        result_PRO = torch.baddbmm(bias_P1O, x.reshape(1, -1, inputs).expand(parts, -1, -1), weight_PIO)
        if result_PRO.shape[1] > 1:
            result_PRO = result_PRO.transpose(0, 1)
        return result_PRO.reshape(*x.shape[:-1], outputs)

    return joined
