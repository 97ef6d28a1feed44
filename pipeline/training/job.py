"""A pretraining job: all that follows from its settings, its tokenizer and its store."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.utils.data import DataLoader

from pipeline.bundle import Model
from pipeline.data.batch import Batch, collate
from pipeline.data.config import OBJECTIVES, ObjectiveConfig, Split
from pipeline.data.datamodule import HeldOut, PretrainExamples, Share, Steps, spread, train_loader
from pipeline.data.objectives import Example, Vocabulary
from pipeline.data.store import Store
from pipeline.data.windows import Windows
from pipeline.model.cost import activation_bytes
from pipeline.tokenizer import Tokenizer
from pipeline.training.callbacks import measured_peak
from pipeline.training.config import PretrainConfig, TrainerConfig
from pipeline.training.module import Network, Training, trained_numbers, training_flops
from pipeline.training.samples import Grams

DEFAULT_STEPS = 1000
UTILISATION = 0.5  # of the peak of matrix products, for an estimate of the time


@dataclass(frozen=True)
class Job:
    """Everything that a pretraining run needs, made from its settings."""

    config: PretrainConfig
    tokenizer: Tokenizer
    store: Store
    model: Model
    steps: Steps
    share: Share
    total_steps: int

    @cached_property
    def examples(self) -> PretrainExamples:
        """Training examples by step, epoch and window."""
        config, family = self.config, self.config.model.family
        vocabulary = Vocabulary.of(self.tokenizer)
        objective = replace(config.objective, name=config.objective.name or OBJECTIVES[family][0])
        return PretrainExamples(self.windows("train"), family, objective, vocabulary, config.seed, self.total_steps)

    @cached_property
    def grams(self) -> Grams:
        return Grams.of(self.store.stream("train"))

    def windows(self, split: Split) -> Windows:
        data = self.config.data
        return Windows(self.store.stream(split), data.sequence_length, within_documents=data.within_documents)

    def held_out(self, split: Split, objective: ObjectiveConfig) -> HeldOut:
        examples, windows = self.examples, self.windows(split)
        chosen = spread(len(windows), self.config.trainer.validation_samples)
        return HeldOut(windows, examples.family, objective, examples.vocabulary, chosen)

    def training(self) -> Training:
        """The LightningModule."""
        config, accumulation = self.config, self.share.accumulation(self.steps.batch_size)
        positions = self.share.micro_batch * config.data.sequence_length
        return Training(
            Network(self.model),
            config.optim,
            config.trainer,
            seed=config.seed,
            total_steps=self.total_steps,
            accumulation=accumulation,
            micro_batch=self.share.micro_batch,
            positions=positions,
        )

    def plan(self) -> str:
        """What the run will do and cost, in a line."""
        data, batch, steps = self.config.data, self.first_batch(), self.total_steps
        flops = training_flops(self.model, batch) / len(batch.targets_BT) * steps * self.steps.batch_size
        tokens = int(steps * len(self.store.stream("train")) / self.steps.per_epoch)
        gpu = torch.cuda.is_available() and self.config.trainer.accelerator in ("auto", "gpu")
        speed = UTILISATION * measured_peak(torch.device("cuda" if gpu else "cpu"), self.config.trainer.precision)
        seconds = flops / (speed * self.share.processes if gpu else speed)
        numbers = sum(parameter.numel() for parameter in self.model.parameters())
        return (
            f"{self.config.model.family} with {numbers:,} parameters, {self.objective_words()}: {steps:,} steps of "
            f"{self.steps.batch_size} × {data.sequence_length} tokens, {tokens:,} in all "
            f"({steps / self.steps.per_epoch:.2f} epochs), {flops:.2g} FLOPs; "
            f"about {in_time(seconds)} and {self.memory(batch) / 1e9:.1f} GB here"
        )

    def objective_words(self) -> str:
        """The objective's name, or those of a schedule in order."""
        return " then ".join(self.config.objective.names(self.config.model.family))

    def first_batch(self) -> Batch:
        """The first micro-batch of the run."""
        keys = self.share.parts(self.steps.keys(0), self.steps.batch_size)[0]
        return collate([self.examples[key] for key in keys or [(0, 0, 0)]], self.tokenizer.pad)

    def loader(self, start: int) -> DataLoader[Example]:
        """Micro-batches of this process from a step on."""
        span, pad = range(start, self.total_steps), self.tokenizer.pad
        return train_loader(self.examples, self.steps, self.share, span, pad, self.config.data.loader_workers)

    def memory(self, batch: Batch) -> float:
        """Bytes of weights, gradients, optimizer state and activations of a process; the libraries come on top."""
        fixed = 16.0 * trained_numbers(self.model)
        if self.config.trainer.strategy == "fsdp":
            fixed /= self.share.processes
        if self.model.architecture.family == "recurrent":
            return fixed
        source = 0 if batch.source_BS is None else batch.source_BS.shape[1]
        target = 0 if batch.inputs_BT is None else batch.inputs_BT.shape[1]
        return fixed + activation_bytes(self.model.architecture, source, target) * self.share.micro_batch


def total_steps(trainer: TrainerConfig, per_epoch: int, tokens: int) -> int:
    """How many steps the limits allow; the tightest counts."""
    epochs = (trainer.max_epochs, trainer.max_tokens and trainer.max_tokens / tokens)
    limits = [trainer.max_steps, *(each and each * per_epoch for each in epochs)]
    return max(1, math.ceil(min(filter(None, limits), default=DEFAULT_STEPS)))


def in_time(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
