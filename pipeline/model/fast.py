"""What keeps a CPU from waiting for its memory: pages kept, and operations torch has no fused kernel for.

Such an operation is a function of autograd's where gradients are wanted, so that it keeps and passes over less; without
them torch's own is called, since the call of such a function takes longer than the work of one written token.
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
    known = x.dtype in (torch.float32, torch.bfloat16)
    return x.device.type == "cpu" and known and not torch.compiler.is_compiling()


class RMSNorm(nn.RMSNorm):
    """Divide by the root of the mean square, and scale."""

    def forward(self, x: Tensor) -> Tensor:
        differentiated = torch.is_grad_enabled() and self.eps is not None
        if differentiated and is_plain(x) and self.weight.dtype == torch.float32:
            return Normalised.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        weight = self.weight.to(x.dtype)  # in mixed precision; torch's fused kernel wants one kind of numbers
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class Normalised(torch.autograd.Function):
    """The norm, whose gradient is that of LayerNorm at mean 0 without what comes from the mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        inverse = x.float().square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()  # float32, whatever the input is
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight).to(x.dtype)  # without a third tensor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        wide = gradient.float()  # torch's kernel sums the gradient of the weight in the numbers it is given
        of_x, of_weight, _ = torch.ops.aten.native_layer_norm_backward(
            wide, x.float(), weight.shape, torch.zeros_like(inverse), inverse, weight, None, [True, True, False]
        )
        of_mean = (wide @ weight).unsqueeze(-1).mul_(inverse).div_(x.shape[-1])
        return of_x.add_(of_mean).to(x.dtype), of_weight, None


def attend(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float
) -> Tensor:
    """Scaled dot-product attention: torch's own kernel, or plain products where that is slow to differentiate."""
    shared = q_BHTD.shape[1] // k_BKSD.shape[1]  # query heads that share keys and values
    if not products_are_faster(q_BHTD, k_BKSD, mask, dropout):
        return F.scaled_dot_product_attention(
            q_BHTD, k_BKSD, v_BKSD, mask, dropout, causal, scale=scale, enable_gqa=shared > 1
        )
    k_BHSD, v_BHSD = repeated(k_BKSD, shared), repeated(v_BKSD, shared)
    scores_BHTS = (q_BHTD * scale) @ k_BHSD.mT
    if causal:
        mask = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool, device=q_BHTD.device).tril()
    if mask is None:
        return dropped(scores_BHTS.softmax(-1), dropout) @ v_BHSD
    scores_BHTS.masked_fill_(~mask, torch.finfo(scores_BHTS.dtype).min)  # a row of infinities would be NaN
    out_BHTD = dropped(scores_BHTS.softmax(-1), dropout) @ v_BHSD
    return out_BHTD if causal else out_BHTD.masked_fill(~mask.any(-1, keepdim=True), 0.0)  # who sees nothing


def repeated(x_BKSD: Tensor, times: int) -> Tensor:
    """Each key-value head as often as query heads share it."""
    return x_BKSD if times == 1 else x_BKSD.repeat_interleave(times, dim=1)


def products_are_faster(q_BHTD: Tensor, k_BKSD: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Whether to keep all scores: for short sequences, more so in bfloat16, and with dropout, when torch does it too.

    Bounded, so that the memory of long sequences grows no faster than they do. Measured by benchmarks/kernels.py. In
    bfloat16 scores are rounded, as on a GPU without a fused kernel.
    """
    differentiated = torch.is_grad_enabled() and (q_BHTD.requires_grad or k_BKSD.requires_grad)
    if not (is_plain(q_BHTD) and differentiated) or (mask is not None and mask.dtype != torch.bool):
        return False
    longest = 512 if q_BHTD.dtype == torch.bfloat16 else 32
    return dropout > 0 or q_BHTD.shape[-2] * k_BKSD.shape[-2] <= longest**2


def dropped(x: Tensor, rate: float, training: bool = True) -> Tensor:
    """Dropout that costs nothing where there is none, and on a CPU two bytes of random bits a number, not two words."""
    if not (training and rate):
        return x
    if not is_plain(x):
        return F.dropout(x, rate)
    cut = min(round(rate * 2**16), 2**16 - 1)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    kept = bits[: x.numel()].view(x.shape) >= cut - 2**15
    return x * kept.to(x.dtype).mul_(2**16 / (2**16 - cut))


def squared_relu(x: Tensor) -> Tensor:
    """The square of what is positive."""
    if not (is_plain(x) and torch.is_grad_enabled()):
        return F.relu(x).square()
    return SquaredReLU.apply(x)  # type: ignore[no-untyped-call]


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
