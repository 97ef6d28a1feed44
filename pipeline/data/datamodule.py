"""Batches of a run: which windows, in what order and with which masks is a function of the seed and nothing else."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from pipeline.data.batch import Batch, collate
from pipeline.data.config import ObjectiveConfig
from pipeline.data.objectives import Example, Vocabulary, current, make_example
from pipeline.data.parallel import exit_with_parent
from pipeline.data.shard import Integers
from pipeline.data.windows import Windows, epoch_order
from pipeline.model.config import Family

Key = tuple[int, int, int]  # step, epoch, sample
GRAIN = 2  # tokens: finer keeps out more padding, coarser lets more rows change places


@dataclass(frozen=True)
class Steps:
    """Which samples each optimizer step reads, over all processes: every sample once an epoch."""

    samples: int
    batch_size: int
    seed: int

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch; the last of them may be smaller."""
        return -(-self.samples // self.batch_size)

    def keys(self, step: int) -> list[Key]:
        """The samples of one step."""
        epoch, place = divmod(step, self.per_epoch)
        order = epoch_order(self.samples, self.seed, epoch)
        chosen = order[place * self.batch_size : (place + 1) * self.batch_size]
        return [(step, epoch, int(sample)) for sample in chosen]


@dataclass(frozen=True)
class TokenSteps:
    """Steps of about as many tokens each: rows of similar length together, so that little is padding."""

    parts: Integers
    """The lengths of each row's parts (its source, its target), one row a row."""
    batch_tokens: int
    seed: int
    batch_size: int = 0
    """Steps have no fixed number of rows."""
    sorted: dict[int, Integers] = field(default_factory=dict)
    """The rows of the epoch that was last asked for, in the order they are cut in: sorted once, not every step."""

    @property
    def per_epoch(self) -> int:
        return len(self.cuts) - 1

    @cached_property
    def rounded(self) -> Integers:
        """Lengths rounded up: rows that are alike in these change places from epoch to epoch."""
        rounded: Integers = -(-self.parts // GRAIN) * GRAIN
        return rounded

    @cached_property
    def cuts(self) -> list[int]:
        """Where the sorted rows are cut into steps, each part padded to its longest; the same in every epoch."""
        rounded = self.rounded[self.similar(np.arange(len(self.parts)))].tolist()  # quicker, one by one
        cuts, longest = [0], rounded[0]
        for place, row in enumerate(rounded):
            longest = [*map(max, longest, row)]
            if place > cuts[-1] and (place + 1 - cuts[-1]) * sum(longest) > self.batch_tokens:
                cuts.append(place)
                longest = row
        return [*cuts, len(rounded)]

    def similar(self, rows: Integers) -> Integers:
        """Rows from the shortest to the longest; of one total by their source, up and down in turn."""
        rounded = self.rounded[rows]
        total = rounded.sum(1)
        source = rounded[:, 0] * np.where(total // GRAIN % 2, -1, 1)
        found: Integers = rows[np.lexsort((source, total))]
        return found

    def keys(self, step: int) -> list[Key]:
        """The rows of one step: which of similar lengths come together, and when, is drawn anew for every epoch."""
        epoch, place = divmod(step, self.per_epoch)
        if epoch not in self.sorted:
            self.sorted.clear()
            self.sorted[epoch] = self.similar(epoch_order(len(self.parts), self.seed, epoch))
        number = int(epoch_order(self.per_epoch, self.seed + 1, epoch)[place])
        return [(step, epoch, int(row)) for row in self.sorted[epoch][self.cuts[number] : self.cuts[number + 1]]]


@dataclass(frozen=True)
class Share:
    """The part of every step that one process computes, in micro-batches; the same number for every process."""

    rank: int
    processes: int
    micro_batch: int
    """Samples computed at a time; 0 is the whole share of a step, however large."""

    def parts(self, keys: Sequence[Key], batch_size: int) -> list[list[Key]]:
        """This process's micro-batches of a step; some may be empty at the end of an epoch."""
        if not self.micro_batch:
            return [list(keys[self.rank :: self.processes])]
        starts = (
            (part * self.processes + self.rank) * self.micro_batch for part in range(self.accumulation(batch_size))
        )
        return [list(keys[start : start + self.micro_batch]) for start in starts]

    def accumulation(self, batch_size: int) -> int:
        """How many micro-batches a process computes for each step."""
        return -(-batch_size // (self.processes * self.micro_batch)) if self.micro_batch else 1


class MicroBatches(Sampler[list[Key]]):
    """The micro-batches of one process for some steps."""

    def __init__(self, steps: "Steps | TokenSteps", share: Share, span: range) -> None:
        self.steps, self.share, self.span = steps, share, span

    def __len__(self) -> int:
        return len(self.span) * self.share.accumulation(self.steps.batch_size)

    def __iter__(self) -> Iterator[list[Key]]:
        for step in self.span:
            yield from self.share.parts(self.steps.keys(step), self.steps.batch_size)


@dataclass(frozen=True)
class PretrainExamples(Dataset[Example]):
    """Windows as examples of an objective that may change in the course of the run."""

    windows: Windows
    family: Family
    objective: ObjectiveConfig
    vocabulary: Vocabulary
    seed: int
    total_steps: int

    def __getitem__(self, key: Key) -> Example:
        step, epoch, sample = key
        objective = current(self.objective, step / self.total_steps)
        generator = np.random.default_rng((self.seed, epoch, sample))
        return make_example(self.windows[sample], self.family, objective, self.vocabulary, generator)


def train_loader(
    examples: Dataset[Example], steps: "Steps | TokenSteps", share: Share, span: range, pad: int, workers: int
) -> DataLoader[Example]:
    """What Lightning iterates over: the micro-batches of some steps."""
    return DataLoader(
        examples,
        batch_sampler=MicroBatches(steps, share, span),
        collate_fn=partial(collate, pad=pad, like=examples[0, 0, 0]),
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=workers > 0,
        worker_init_fn=exit_with_parent,
    )


def spread(total: int, count: int) -> list[int]:
    """So many numbers below a total, evenly taken from all; 0 is all."""
    chosen: list[int] = np.linspace(0, total - 1, min(count or total, total)).astype(int).tolist()
    return chosen


@dataclass(frozen=True)
class HeldOut:
    """Examples to validate on, the same ones with the same masks at every call."""

    windows: Windows
    family: Family
    objective: ObjectiveConfig
    vocabulary: Vocabulary
    numbers: list[int]

    def example(self, number: int) -> Example:
        """The example of a window; what is continued is always its second half."""
        ids = self.windows[number]
        split = len(ids) // 2 if self.objective.name == "prefix" and len(ids) > 1 else None
        generator = np.random.default_rng((0, number))
        return make_example(ids, self.family, self.objective, self.vocabulary, generator, split=split)

    def batches(self, share: Share, pad: int) -> Iterator[Batch]:
        """The batches of one process; over all processes every example comes once."""
        own = self.numbers[share.rank :: share.processes]
        most = -(-len(self.numbers) // share.processes)
        for start in range(0, most, share.micro_batch):  # as many for each: with fsdp they wait for each other
            chosen = [self.example(number) for number in own[start : start + share.micro_batch]]
            yield collate(chosen, pad=pad, like=self.example(self.numbers[0]))
