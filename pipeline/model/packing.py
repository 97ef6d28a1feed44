"""Weights laid out for products of few rows, while a model writes.

Shapes: R rows, I inputs, O outputs, P parts of the outputs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Product = Callable[[Tensor], Tensor]


@contextmanager
def packed(*parts: nn.Module, rows: int) -> Iterator[None]:
    """Make products of so many rows fast on a CPU, with a copy of the weights; afterwards all is as before.

    They take as long as reading the weights does, for which MKL takes one core of several for one row, and a slow path
    on AMD for more.
    """
    modules = [module for part in parts for module in part.modules()]
    linears = [module for module in modules if type(module) is nn.Linear and packable(module.weight)]
    try:
        for linear in linears:
            vars(linear)["forward"] = by_parts(linear) if rows == 1 else reordered(linear)
        yield
    finally:
        for linear in linears:
            vars(linear).pop("forward", None)


def packable(weight_OI: Tensor) -> bool:
    on_cpu = weight_OI.device.type == "cpu" and weight_OI.dtype == torch.float32
    return on_cpu and not torch.is_autocast_enabled("cpu")


def by_parts(linear: nn.Linear) -> Product:
    """The product with a part of the outputs for each core: of a batch of products, each core takes its share."""
    parts = torch.get_num_threads()
    if linear.out_features % parts:
        return linear.forward
    weight_PIO = linear.weight.unflatten(0, (parts, -1)).mT.contiguous()
    bias_P1O = (torch.zeros(()) if linear.bias is None else linear.bias).expand(linear.out_features).view(parts, 1, -1)

    def product(x: Tensor) -> Tensor:
        x_PRI = x.reshape(1, -1, linear.in_features).expand(parts, -1, -1)
        return torch.baddbmm(bias_P1O, x_PRI, weight_PIO).transpose(0, 1).reshape(*x.shape[:-1], linear.out_features)

    return product


def reordered(linear: nn.Linear) -> Product:
    """The product by oneDNN, with weights in the order in which it reads them."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return linear.forward
    weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
    multiply, bias = torch.ops.mkldnn._linear_pointwise.default, linear.bias
    return lambda x: multiply(x, weight, bias, "none", [], "")  # no activation
