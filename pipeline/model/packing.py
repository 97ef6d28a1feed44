"""Weights laid out for products of few rows, while a model writes.

Shapes: R rows, I inputs, O outputs, P parts of the outputs.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

PARTS_PER_THREAD = 2  # measured: faster than one
LEAST_OUTPUTS = 16  # of a part: float32 numbers in a cache line


@contextmanager
def packed(*modules: nn.Module) -> Iterator[None]:
    """Make products of few rows fast on a CPU, with a copy of the weights; afterwards the modules are as before."""
    linears = [part for module in modules for part in module.modules() if type(part) is nn.Linear]
    try:
        for linear in linears:
            if linear.weight.device.type == "cpu" and not torch.is_autocast_enabled("cpu"):
                vars(linear)["forward"] = by_parts(linear)
        yield
    finally:
        for linear in linears:
            vars(linear).pop("forward", None)


def by_parts(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    """The product of a layer as a batch of products, each of a part of the outputs.

    Such a product takes as long as reading its weights does. MKL reads those of one row with one core only and those of
    more rows in an order that is slow on some processors; of a batch, every core takes its share in good order.
    """
    most = max(1, linear.out_features // LEAST_OUTPUTS)
    parts = math.gcd(linear.out_features, min(most, PARTS_PER_THREAD * torch.get_num_threads()))
    weight_PIO = linear.weight.reshape(parts, -1, linear.in_features).mT.contiguous()
    bias = linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
    bias_P1O = bias.view(parts, 1, -1)

    def product(x: Tensor) -> Tensor:
        x_PRI = x.reshape(1, -1, linear.in_features).expand(parts, -1, -1)
        result_PRO = torch.baddbmm(bias_P1O, x_PRI, weight_PIO)
        return result_PRO.transpose(0, 1).reshape(*x.shape[:-1], linear.out_features)

    return product
