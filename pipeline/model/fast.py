"""What keeps a CPU from waiting for its memory: pages kept, and operations torch has no fused kernel for.

Such an operation is a function of autograd's where gradients are wanted, so that it keeps and passes over less; without
them it is called plainly, since the call of such a function takes longer than the work of one written token.
"""

import ctypes
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def keep_freed_memory() -> None:
    """Let glibc use freed memory again at once; given back to the system, each page of it would be cleared anew."""
    trim, threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    with suppress(OSError, AttributeError):  # another C library
        library = ctypes.CDLL("libc.so.6")
        library.mallopt(trim, 2**31 - 1)
        library.mallopt(threshold, 2**30) or library.mallopt(threshold, 2**25)  # the most that older ones take


def is_plain(x: Tensor) -> bool:
    """Whether it is for us to be fast; compilers and GPUs fuse such operations themselves."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling()


class RMSNorm(nn.RMSNorm):
    """Divide by the root of the mean square, and scale."""

    def forward(self, x: Tensor) -> Tensor:
        if is_plain(x) and self.weight.dtype == x.dtype and self.eps is not None:
            if not torch.is_grad_enabled():
                return normalised(x, self.weight, inverse_root(x, self.eps))
            result: Tensor = Normalised.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
            return result
        weight = self.weight.to(x.dtype)  # in mixed precision; torch's fused kernel wants one kind of numbers
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def inverse_root(x: Tensor, epsilon: float) -> Tensor:
    """One by the root of the mean square."""
    return x.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()


def normalised(x: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    """The norm, without a third tensor."""
    return (x * inverse).mul_(weight)


class Normalised(torch.autograd.Function):
    """The norm, whose gradient is that of LayerNorm at mean 0 without what comes from the mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        inverse = inverse_root(x, epsilon)
        ctx.save_for_backward(x, weight, inverse)
        return normalised(x, weight, inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        of_x, of_weight, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, x, weight.shape, torch.zeros_like(inverse), inverse, weight, None, [True, True, False]
        )
        of_mean = (gradient @ weight).unsqueeze(-1).mul_(inverse).div_(x.shape[-1])
        return of_x.add_(of_mean), of_weight, None


def squared_relu(x: Tensor) -> Tensor:
    """The square of what is positive."""
    if not (is_plain(x) and torch.is_grad_enabled()):
        return F.relu(x).square()
    result: Tensor = SquaredReLU.apply(x)  # type: ignore[no-untyped-call]
    return result


class SquaredReLU(torch.autograd.Function):
    """Keeps one tensor for its gradient instead of two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = x.relu()
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return (gradient * positive).mul_(2)
