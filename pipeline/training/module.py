"""The LightningModules: a gradient that is that of the whole step's (loss sum ÷ count), whatever computes it.

Shapes: B batch, S source tokens, T target tokens, P positions with loss, C width.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pipeline.bundle import Model
from pipeline.data.batch import Batch
from pipeline.data.objectives import IGNORED
from pipeline.errors import Diverged
from pipeline.evaluation.predicting import class_logits, embeddings
from pipeline.model.heads import Pooling
from pipeline.model.transformer import Transformer
from pipeline.training.config import OptimConfig, TrainerConfig
from pipeline.training.optim import make_optimizer, rate_share, set_rate


@dataclass
class Progress:
    """Where a run stands, in plain numbers; saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    """Raw tokens read."""
    tokens_computed: int = 0
    """Source and target positions computed."""
    tokens_loss: int = 0
    """Positions that carried loss."""
    flops: float = 0.0
    seconds: float = 0.0
    skipped: int = 0
    """Steps without a finite gradient."""
    skipped_in_row: int = 0
    loss_sum: float = 0.0
    """Since the last row of metrics."""
    loss_count: int = 0
    gradient_norm: float = 0.0
    best: float = math.inf
    """The best score so far, the lower the better."""
    stale: int = 0
    """Validations since then."""
    ended: bool = False
    """Whether the run has come to its end, which may be before its last step."""


class Network(nn.Module):
    """A model and the loss of a batch, in one forward, so that whatever wraps it sees all of it."""

    def __init__(self, model: Model, smoothing: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.smoothing = smoothing

    def forward(self, batch: Batch, each: bool = False) -> Tensor:
        """The summed loss of a batch, or the plain loss of each position that has one."""
        states_BTC = batch.states(self.model)
        wanted_BT = batch.targets_BT != IGNORED
        states_PC, targets_P = states_BTC[wanted_BT], batch.targets_BT[wanted_BT]
        if each:
            return self.model.head.losses(states_PC, targets_P)
        if not len(targets_P):  # every weight needs a gradient, or other processes wait for it
            return 0.0 * self.model.head.loss(states_BTC[:1, 0], batch.targets_BT.new_zeros(1))
        return self.model.head.loss(states_PC, targets_P, self.smoothing)


class Classifier(Network):
    """A model with a classifier, and the loss of the classes of a batch."""

    def __init__(self, model: Model, pooling: Pooling, smoothing: float, weights_L: Tensor | None) -> None:
        super().__init__(model, smoothing)
        self.pooling = pooling
        self.weights_L: Tensor | None
        self.register_buffer("weights_L", weights_L, persistent=False)

    def forward(self, batch: Batch, each: bool = False) -> Tensor:
        logits_BL = class_logits(self.model, batch, self.pooling).float()
        assert batch.labels_B is not None
        weights_L, smoothing = (None, 0.0) if each else (self.weights_L, self.smoothing)
        losses_B = F.cross_entropy(logits_BL, batch.labels_B, weights_L, reduction="none", label_smoothing=smoothing)
        return losses_B[batch.labels_B != IGNORED] if each else losses_B.sum()


class Retriever(Network):
    """Two towers that are one model: a query should be nearer to its document than to the others of its micro-batch.

    InfoNCE (van den Oord and others, 2018). A document that answers a query is never a negative of it.
    """

    def __init__(self, model: Model, pooling: Pooling, temperature: float) -> None:
        super().__init__(model)
        self.pooling, self.temperature = pooling, temperature

    def forward(self, batch: Batch, each: bool = False) -> Tensor:
        assert batch.documents is not None and batch.relevant_BB is not None and batch.labels_B is not None
        queries_BC, documents_BC = (embeddings(self.model, part, self.pooling) for part in (batch, batch.documents))
        own_B = torch.arange(len(queries_BC), device=queries_BC.device)
        others_BB = batch.relevant_BB & (own_B != own_B[:, None])
        with torch.autocast(queries_BC.device.type, enabled=False):  # 16 bits are too few after the temperature
            scores_BB = (queries_BC @ documents_BC.T / self.temperature).masked_fill(others_BB, -math.inf)
        losses_B, wanted_B = F.cross_entropy(scores_BB, own_B, reduction="none"), batch.labels_B != IGNORED
        return losses_B[wanted_B] if each else (losses_B * wanted_B).sum()


class Training(pl.LightningModule):
    """One step of any job: seeded dropout, an exact accumulation, a schedule, and no step on a broken gradient."""

    def __init__(
        self,
        network: Network,
        optim: OptimConfig,
        trainer: TrainerConfig,
        *,
        seed: int,
        total_steps: int,
        accumulation: int,
        micro_batch: int,
        positions: int,
    ) -> None:
        super().__init__()
        self.network = network
        self.optim, self.settings, self.seed = optim, trainer, seed
        self.total_steps, self.accumulation, self.micro_batch = total_steps, accumulation, micro_batch
        self.positions = positions
        """About how many positions of a micro-batch carry loss; it keeps 16-bit gradients in range."""
        self.progress = Progress()
        self.told_to_stop = False
        """Set by a signal, at any moment."""
        self.stopping = False
        """What all processes agree on at the end of a step."""
        self.sharded = False
        self.pending = np.zeros(4)
        self.pending_loss: Tensor | float = 0.0
        model = network.model
        for stack in (model.encoder, model.decoder):
            if stack is not None and isinstance(model, Transformer):
                stack.recompute = trainer.recompute
            if stack is not None and trainer.compile:
                stack.compile()

    @property
    def model(self) -> Model:
        return self.network.model

    def configure_model(self) -> None:
        """Cut the weights into parts, one a process, where the strategy asks for it."""
        if self.settings.strategy != "fsdp" or self.sharded or self.device_mesh is None:
            return
        from torch.distributed.fsdp import fully_shard

        mesh = self.device_mesh["data_parallel"]
        for stack in (self.model.encoder, self.model.decoder):
            for block in getattr(stack, "blocks", []):
                fully_shard(block, mesh=mesh)
        fully_shard(self.network, mesh=mesh)
        self.sharded = True

    def configure_optimizers(self) -> Optimizer:
        return make_optimizer(self.model, self.optim, self.settings.precision)

    def training_step(self, batch: Batch, number: int) -> Tensor:
        """The loss of a micro-batch, in a unit that the end of the step sets right."""
        micro = number % self.accumulation
        if micro == 0:
            set_rate(self.trainer.optimizers[0], rate_share(self.optim, self.progress.step, self.total_steps))
        torch.manual_seed(mixed(self.seed, self.progress.step, micro, self.global_rank))
        loss: Tensor = self.network(batch)
        parts = (batch, batch.documents) if batch.documents else (batch,)
        computed = sum(ids.numel() for part in parts for ids in (part.source_BS, part.inputs_BT) if ids is not None)
        flops = sum(training_flops(self.model, part) for part in parts)
        self.pending_loss = self.pending_loss + loss.detach()  # stays on the device, which need not be waited for
        self.pending += (batch.loss_positions, batch.tokens, computed, flops)
        return loss / self.positions

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Turn the gradient into that of the mean over all processes and micro-batches; drop it if it is broken."""
        own = np.array([float(self.pending_loss), *self.pending, self.told_to_stop])
        self.pending[:], self.pending_loss = 0, 0.0
        loss, count, tokens, computed, flops, stopping = self.over_all_processes(own)
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        scale = self.positions * self.accumulation * self.trainer.world_size / max(count, 1)
        whole = torch.nn.utils.get_total_norm(gradients)
        norm = float(whole.full_tensor() if isinstance(whole, DTensor) else whole) * scale
        done = self.progress
        done.tokens, done.tokens_computed = done.tokens + int(tokens), done.tokens_computed + int(computed)
        done.tokens_loss, done.flops = done.tokens_loss + int(count), done.flops + flops
        self.stopping = stopping > 0
        done.gradient_norm = norm
        if math.isfinite(norm) and math.isfinite(loss):
            shortened = min(1.0, self.optim.clip / (norm + 1e-6)) if self.optim.clip else 1.0
            torch._foreach_mul_(gradients, scale * shortened)
            done.loss_sum, done.loss_count = done.loss_sum + loss, done.loss_count + int(count)
            done.skipped_in_row = 0
            return
        for parameter in self.parameters():
            parameter.grad = None  # the optimizer passes over it
        done.skipped, done.skipped_in_row = done.skipped + 1, done.skipped_in_row + 1
        if done.skipped_in_row >= self.settings.bad_steps:
            raise Diverged(
                f"no finite gradient for {done.skipped_in_row} steps up to step {done.step + 1:,}; the last good "
                "checkpoint is kept: resume it with a lower optim.lr or another precision"
            )

    def over_all_processes(self, numbers: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
        """Sums over all processes."""
        if self.trainer.world_size == 1:
            return numbers.tolist()
        whole = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(whole)
        return whole.tolist()


def mixed(*numbers: int) -> int:
    """One seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def training_flops(model: Model, batch: Batch) -> float:
    """Operations of a forward and backward pass over a batch, padding included."""
    source = 0 if batch.source_BS is None else batch.source_BS.shape[1]
    target = 0 if batch.inputs_BT is None else batch.inputs_BT.shape[1]
    predicted = batch.loss_positions if batch.labels_B is None else 0
    others = (len(batch.targets_BT) - 1) * model.training_flops(source, target, 0)
    return float(others + model.training_flops(source, target, predicted))


def trained_numbers(model: nn.Module) -> int:
    """Of parameters that learn."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
