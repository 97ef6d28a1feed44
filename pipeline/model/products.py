"""Products of matrices by oneDNN, on processors of which MKL, torch's choice for 32 bits, uses but a half.

MKL takes AVX-512 on Intel's processors only; oneDNN, which torch brings too, takes it wherever it is.

Shapes: R rows, I inputs, O outputs.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeline.model.fast import is_plain

LEAST_ROWS = 64  # measured: of fewer, oneDNN takes too long to lay out the weights


@lru_cache(maxsize=1)
def onednn_is_ahead() -> bool:
    """Asked of the processor, not of a clock: a run that goes on must compute as it did before."""
    has_both = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"  # type: ignore[no-untyped-call]
    return has_both and "AuthenticAMD" in processor()


def processor() -> str:
    """What the system says of it."""
    return path.read_text() if (path := Path("/proc/cpuinfo")).is_file() else ""


def suits_onednn(x: Tensor) -> bool:
    """Whether to multiply these rows by oneDNN; compilers and mixed precision choose their products themselves."""
    return (
        is_plain(x)
        and x.dtype == torch.float32
        and x.numel() >= LEAST_ROWS * x.shape[-1]
        and onednn_is_ahead()
        and not torch.is_autocast_enabled("cpu")
    )


class Linear(nn.Linear):
    """A layer that is multiplied by the quicker library."""

    def forward(self, x: Tensor) -> Tensor:
        if not suits_onednn(x):
            return super().forward(x)
        if not torch.is_grad_enabled():
            return linear(x, self.weight, self.bias)
        return Product.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]


class Product(torch.autograd.Function):
    """What a linear layer computes, and its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return linear(x, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        gradient_RO, x_RI = gradient.flatten(0, -2), x.flatten(0, -2)
        return (
            linear(gradient, weight_OI.T) if for_x else None,
            product_over_rows(gradient_RO, x_RI) if for_weight else None,
            gradient_RO.sum(0) if for_bias else None,
        )


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """The rows of x times the transposed weight, which may lie in memory in either order."""
    if not suits_onednn(x):
        return F.linear(x, weight_OI, bias_O)
    return onednn_linear(x, weight_OI, bias_O)


def onednn_linear(
    x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, activation: str = "none", kind: str = ""
) -> Tensor:
    """oneDNN's product, which activates what it has just computed; looked up late: a Mac's torch is without oneDNN."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight_OI, bias_O, activation, [], kind)


def product_over_rows(one_RO: Tensor, other_RI: Tensor) -> Tensor:
    """The transposed first times the second, summed over rows; oneDNN copies one of them, so the narrower."""
    if not suits_onednn(one_RO):
        return one_RO.T @ other_RI
    if one_RO.shape[1] > other_RI.shape[1]:
        return linear(other_RI.T.contiguous(), one_RO.contiguous().T).T
    return linear(one_RO.T.contiguous(), other_RI.contiguous().T)


def add_product_over_rows(sum_OI: Tensor, one_RO: Tensor, other_RI: Tensor) -> None:
    """Add such a product to what may be of wider numbers."""
    if sum_OI.dtype == one_RO.dtype and not suits_onednn(one_RO):
        sum_OI.addmm_(one_RO.T, other_RI)  # without a second tensor of its size
    else:
        sum_OI += product_over_rows(one_RO, other_RI)


def products(one: Tensor, other: Tensor) -> Tensor:
    """The product of each pair of two stacks of matrices."""
    if not suits_onednn(one[0]):
        return one @ other
    return torch.stack([linear(left, right.T) for left, right in zip(one, other, strict=True)])


def added_products(added: Tensor, one: Tensor, other: Tensor, beta: float, alpha: float = 1.0) -> Tensor:
    """As `baddbmm`: beta × added + alpha × the products."""
    if not suits_onednn(one[0]):
        return torch.baddbmm(added, one, other, beta=beta, alpha=alpha)
    return products(one, other).mul_(alpha).add_(added, alpha=beta)
