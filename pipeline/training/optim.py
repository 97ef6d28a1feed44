"""Optimizers, each weight in exactly one group, and learning rates as pure functions of the step."""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

from pipeline.model.products import added_products, products
from pipeline.training.config import OptimConfig, Precision

TOGETHER = 2**24  # numbers, in matrices of one shape, that Muon makes orthogonal at a time


def make_optimizer(model: nn.Module, config: OptimConfig, precision: Precision = "32") -> Optimizer:
    """AdamW, or Muon for the matrices of the blocks and AdamW for everything else."""
    groups = parameter_groups(model, config)
    if config.name == "muon":
        narrow = numbers_of(next(model.parameters()).device, precision) == torch.bfloat16
        return Muon(groups, betas=config.betas, eps=config.epsilon, narrow=narrow)
    placed = all(parameter.device.type in ("cpu", "cuda") for parameter in model.parameters())
    fused = placed and precision != "16-mixed"  # it takes back the scale of gradients itself: after they are clipped
    return AdamW(groups, lr=config.highest, betas=config.betas, eps=config.epsilon, fused=fused)


def numbers_of(device: torch.device, precision: Precision) -> torch.dtype:
    """What products are computed in; on a CPU Lightning takes bfloat16 for 16-mixed."""
    if precision == "32":
        return torch.float32
    return torch.float16 if precision == "16-mixed" and device.type != "cpu" else torch.bfloat16


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Matrices decay and vectors do not; with Muon the matrices of the blocks are groups of their own."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    top = 1 + max(map(depth, trained))
    groups: dict[tuple[bool, bool, float], list[Tensor]] = {}
    for name, parameter in trained.items():
        muon = config.name == "muon" and parameter.dim() == 2 and ".blocks." in name
        share = config.layer_decay ** (top - depth(name)) if is_backbone(name) else 1.0
        groups.setdefault((muon, parameter.dim() >= 2, share), []).append(parameter)
    grouped = [id(parameter) for group in groups.values() for parameter in group]
    assert sorted(grouped) == sorted(map(id, trained.values())), "a weight in no group, or in two"
    return [
        {
            "params": parameters,
            "peak": share * (config.muon_lr if muon else config.highest),
            "lr": share * (config.muon_lr if muon else config.highest),
            "weight_decay": config.weight_decay if matrices else 0.0,
            "muon": muon,
        }
        for (muon, matrices, share), parameters in groups.items()
    ]


def depth(name: str) -> int:
    """Where a weight stands in its stack: the blocks from 1, what is below them 0."""
    found = re.search(r"blocks\.(\d+)\.", name)
    return int(found[1]) + 1 if found else 0


def is_backbone(name: str) -> bool:
    """Whether a weight is below a head: in a block, in the embeddings or in the positions."""
    return "blocks." in name or "embedding" in name or "positions" in name


def set_rate(optimizer: Optimizer, share: float) -> None:
    """Set every group to a share of its highest learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * share


def rate_share(config: OptimConfig, step: int, total: int) -> float:
    """The learning rate of a step, counted from 0, as a share of the highest; never 0 before the end."""
    warmup = min(config.warmup_steps, total // 2)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    past = (step - warmup) / max(1, total - warmup)  # 0 after the warm-up, below 1 at the last step
    falling: dict[str, Callable[[float], float]] = {
        "cosine": lambda part: (1 + math.cos(math.pi * part)) / 2,
        "linear": lambda part: 1 - part,
        "stable": lambda part: min(1.0, (1 - part) / config.decay_share),
    }
    if config.schedule in falling:
        return config.final_share + (1 - config.final_share) * falling[config.schedule](past)
    if config.schedule == "inverse_sqrt":
        return math.sqrt(max(warmup, 1) / max(step, warmup, 1))
    return 1.0


class Muon(Optimizer):
    """Momentum made orthogonal for matrices (Jordan et al. 2024), AdamW for the groups that are not marked `muon`.

    The library's Muon orthogonalises in bfloat16, which is slow without hardware for it; this one does so on a GPU, and
    on a CPU where it is asked to.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], betas: tuple[float, float], eps: float, narrow: bool = False
    ) -> None:
        self.narrow = narrow
        super().__init__(groups, {"betas": betas, "eps": eps, "momentum": 0.95, "iterations": 5})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every weight that has a gradient."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["muon"]:
                self.update_matrices(parameters, group)
            elif parameters:
                self.update_rest(parameters, group)
        return result

    def update_matrices(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        alike: dict[torch.Size, list[Tensor]] = {}
        for parameter in parameters:
            alike.setdefault(parameter.shape, []).append(parameter)
        for (rows, columns), matrices in alike.items():
            scale = max(1.0, rows / columns) ** 0.5
            together = max(1, TOGETHER // (rows * columns))
            for start in range(0, len(matrices), together):
                part = matrices[start : start + together]
                ahead = torch.stack([self.ahead(matrix, group) for matrix in part])
                updates = orthogonal(ahead, group["iterations"], self.narrow or ahead.is_cuda)
                for parameter, update in zip(part, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"] * scale)

    def ahead(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """The gradient with its momentum, by Nesterov's rule."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
        return parameter.grad.lerp(state["momentum"], group["momentum"])

    def update_rest(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0, device=parameter.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        averages, squares, steps = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))
        adamw(
            parameters, gradients, averages, squares, [], steps, fused=parameters[0].device.type in ("cpu", "cuda"),
            amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"],
            eps=group["eps"], maximize=False,
        )  # fmt: skip


def orthogonal(matrices: Tensor, iterations: int, narrow: bool = False) -> Tensor:
    """About the nearest matrices with singular values of one, by Newton and Schulz's iteration."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = (matrices.mT if tall else matrices).to(torch.bfloat16 if narrow else torch.float32)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    if x.dtype == torch.float32 and x.shape[-1] >= 2 * x.shape[-2]:
        x = products(iterated(products(x, x.mT), iterations), x)
    else:
        for _ in range(iterations):
            x = added_products(x, polynomial(products(x, x.mT)), x, beta=3.4445)
    return (x.mT if tall else x).to(matrices.dtype)


def polynomial(gram: Tensor) -> Tensor:
    return added_products(gram, gram, gram, beta=-4.7750, alpha=2.0315)


def iterated(gram: Tensor, iterations: int) -> Tensor:
    """All iterations as one factor, made of small matrices only; squaring as it does, it needs full precision."""
    factor = None
    for left in reversed(range(iterations)):
        step = polynomial(gram)
        step.diagonal(dim1=-2, dim2=-1).add_(3.4445)
        factor = step if factor is None else products(step, factor)
        gram = products(products(step, gram), step) if left else gram
    assert factor is not None
    return factor
