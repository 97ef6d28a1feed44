"""What stands on top of a model: the output matrix, a classifier, an embedding."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeline.model.block import ACTIVATIONS, make_norm
from pipeline.model.config import Architecture
from pipeline.model.products import Linear, add_product_over_rows, linear

LOSS_CHUNK = 1024  # positions whose logits exist at the same time


class LanguageHead(nn.Module):
    """From states to the logits of the vocabulary, or to the loss without ever holding all logits."""

    def __init__(self, model: Architecture, vocab_size: int) -> None:
        super().__init__()
        self.scale = model.width**-0.5 if model.output_scale else 1.0
        self.cap = model.logit_soft_cap
        self.transform: nn.Module = HeadTransform(model) if model.head_transform else nn.Identity()
        self.output = Linear(model.width, vocab_size, bias=model.output_bias)

    def forward(self, states: Tensor) -> Tensor:
        logits = self.output(self.transform(states) * self.scale)
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    def loss(self, states_PC: Tensor, targets_P: Tensor, smoothing: float = 0.0) -> Tensor:
        """The summed cross entropy of positions, with gradients."""
        states_PC = self.transform(states_PC) * self.scale
        return SummedLoss.apply(  # type: ignore[no-untyped-call]
            states_PC, self.output.weight, self.output.bias, targets_P, smoothing, self.cap
        )

    @torch.no_grad()
    def losses(self, states_PC: Tensor, targets_P: Tensor) -> Tensor:
        """The cross entropy of each position, for measuring."""
        pairs = zip(torch.split(states_PC, LOSS_CHUNK), torch.split(targets_P, LOSS_CHUNK), strict=True)
        parts = [F.cross_entropy(self(states).float(), targets, reduction="none") for states, targets in pairs]
        return torch.cat(parts) if parts else states_PC.new_zeros(0)


class SummedLoss(torch.autograd.Function):
    """Cross entropy whose gradient is made beside it, chunk by chunk, so that no logits are kept or computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        states_PC: Tensor,
        weight_VC: Tensor,
        bias_V: Tensor | None,
        targets_P: Tensor,
        smoothing: float,
        cap: float,
    ) -> Tensor:
        device = states_PC.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states_PC.dtype
        back = torch.float32 if dtype == torch.float16 else dtype  # a scaler of losses comes too late for this gradient
        narrow_PC, narrow_VC = states_PC.to(dtype), weight_VC.to(dtype)
        back_PC, back_VC = narrow_PC.to(back), narrow_VC.to(back)
        total = states_PC.new_zeros((), dtype=torch.float32)
        of_states, of_weight = torch.empty_like(back_PC), torch.zeros_like(weight_VC)
        of_bias = None if bias_V is None else torch.zeros_like(bias_V)
        for start in range(0, len(targets_P), LOSS_CHUNK):
            chunk = slice(start, start + LOSS_CHUNK)
            with torch.autocast(device, enabled=False):  # the kinds of numbers are chosen above
                logits_PV = linear(narrow_PC[chunk], narrow_VC, None if bias_V is None else bias_V.to(dtype)).float()
                loss, of_logits_PV = loss_and_gradient(logits_PV, targets_P[chunk, None], smoothing, cap)
                total += loss
                if of_bias is not None:
                    of_bias += of_logits_PV.sum(0)
                back_PV = of_logits_PV.to(back)
                of_states[chunk] = linear(back_PV, back_VC.T)
                add_product_over_rows(of_weight, back_PV, back_PC[chunk])
        ctx.save_for_backward(of_states.to(states_PC.dtype), of_weight, of_bias)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_states, of_weight, of_bias = (None if kept is None else kept.mul_(gradient) for kept in ctx.saved_tensors)
        return of_states, of_weight, of_bias, None, None, None


def loss_and_gradient(logits_PV: Tensor, targets_P1: Tensor, smoothing: float, cap: float) -> tuple[Tensor, Tensor]:
    """The summed loss of logits, and its gradient in their place."""
    if cap:
        logits_PV.div_(cap).tanh_()
        slope_PV = 1 - logits_PV.square()
        logits_PV.mul_(cap)
    told = 1 - smoothing
    logits_PV.sub_(logits_PV.amax(-1, keepdim=True))  # from each, or the sums would be of large numbers
    loss = -told * logits_PV.gather(-1, targets_P1).sum()
    if smoothing:
        loss -= smoothing * logits_PV.mean(-1).sum()
    gradient_PV = logits_PV.exp_()
    sums_P1 = gradient_PV.sum(-1, keepdim=True)
    loss += sums_P1.log().sum()
    gradient_PV.div_(sums_P1)
    if smoothing:
        gradient_PV -= smoothing / gradient_PV.shape[-1]
    gradient_PV.scatter_add_(-1, targets_P1, torch.full_like(sums_P1, -told))
    return loss, gradient_PV.mul_(slope_PV) if cap else gradient_PV


class HeadTransform(nn.Module):
    """The layer that BERT puts before its output matrix."""

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        self.linear = Linear(model.width, model.width)
        self.activate = ACTIVATIONS[model.activation]
        self.norm = make_norm(model)

    def forward(self, states: Tensor) -> Tensor:
        return self.norm(self.activate(self.linear(states)))


Pooling = Literal["mean", "class", "last"]


def pooled(states_BTC: Tensor, real_BT: Tensor | None, pooling: Pooling) -> Tensor:
    """One state for a sequence padded on the right: the mean of its real tokens, its first, or its last real one."""
    if pooling == "class":
        return states_BTC[:, 0]
    if real_BT is None:
        return states_BTC.mean(1) if pooling == "mean" else states_BTC[:, -1]
    count_B = real_BT.sum(1).clamp(min=1)
    if pooling == "last":
        return states_BTC[torch.arange(len(states_BTC), device=states_BTC.device), count_B - 1]
    return (states_BTC * real_BT[..., None]).sum(1) / count_B[:, None]


class ClassificationHead(nn.Module):
    """From one state to the logits of classes."""

    def __init__(self, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(width, classes)
        nn.init.normal_(self.output.weight, std=0.02)
        nn.init.zeros_(self.output.bias)

    def forward(self, state_BC: Tensor) -> Tensor:
        return self.output(self.dropout(state_BC))
