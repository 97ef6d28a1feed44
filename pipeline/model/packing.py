"""Weights laid out for products of few rows, while a model writes.

Shapes: R rows, I inputs, O outputs, P parts of the outputs.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipeline.model.attention import Attention

PARTS_PER_THREAD = 2  # measured: faster than one
LEAST_OUTPUTS = 16  # of a part: float32 numbers in a cache line


@contextmanager
def packed(*modules: nn.Module) -> Iterator[None]:
    """Make products of few rows fast on a CPU, with a copy of the weights; afterwards the modules are as before."""
    parts = [part for module in modules for part in module.modules()]
    linears = [part for part in parts if type(part) is nn.Linear]
    attentions = [part for part in parts if type(part) is Attention and not part.cross]
    try:
        if next(modules[0].parameters()).device.type == "cpu" and not torch.is_autocast_enabled("cpu"):
            for linear in linears:
                vars(linear)["forward"] = by_parts(linear.weight, linear.bias)
            for attention in attentions:
                vars(attention)["projections"] = in_one_product(attention)
        yield
    finally:
        for part in parts:
            vars(part).pop("forward", None)
            vars(part).pop("projections", None)


def in_one_product(attention: Attention) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Queries, keys and values of the same states."""
    layers = (attention.query, attention.key_value)
    bias = None if attention.query.bias is None else torch.cat([layer.bias for layer in layers])
    product = by_parts(torch.cat([layer.weight for layer in layers]), bias)
    widths = [layer.out_features for layer in layers]
    return lambda x: torch.split(product(x), widths, -1)


def by_parts(weight_OI: Tensor, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The product of a layer as a batch of products, each of a part of the outputs.

    Such a product takes as long as reading its weights does. MKL reads those of one row with one core only and those of
    more rows in an order that is slow on some processors; of a batch, every core takes its share in good order.
    """
    outputs, inputs = weight_OI.shape
    parts = math.gcd(outputs, min(max(1, outputs // LEAST_OUTPUTS), PARTS_PER_THREAD * torch.get_num_threads()))
    weight_PIO = weight_OI.reshape(parts, -1, inputs).mT.contiguous()
    bias_P1O = (weight_OI.new_zeros(outputs) if bias_O is None else bias_O).view(parts, 1, -1)

    def product(x: Tensor) -> Tensor:
        result_PRO = torch.baddbmm(bias_P1O, x.reshape(1, -1, inputs).expand(parts, -1, -1), weight_PIO)
        if result_PRO.shape[1] > 1:
            result_PRO = result_PRO.transpose(0, 1)
        return result_PRO.reshape(*x.shape[:-1], outputs)

    return product
