"""Batches: padding changes nothing but the shape."""

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pipeline.data.batch import Batch, collate
from pipeline.data.objectives import IGNORED, Example
from pipeline.data.shard import Integers

PAD = 7  # also an ordinary id in these examples: only the masks can tell


def row(length: int) -> Integers:
    return np.arange(length) % 10


def example(source: int = 0, inputs: int = 0, prefix: int = 0) -> Example:
    """An example with so many positions on each side; 0 is a side that is not there."""
    return Example(
        source=row(source) if source else None,
        inputs=row(inputs) + 1 if inputs else None,
        targets=np.where(row(inputs or source) < 4, row(inputs or source) + 2, IGNORED),
        prefix=prefix,
        tokens=100 * source + inputs,
    )


sizes = st.integers(1, 30)
batches = (
    st.lists(st.builds(example, source=sizes), min_size=1, max_size=5)
    | st.lists(st.builds(example, inputs=sizes, prefix=st.integers(0, 1)), min_size=1, max_size=5)
    | st.lists(st.builds(example, source=sizes, inputs=sizes), min_size=1, max_size=5)
)


@given(batches)
def test_a_batch_holds_its_examples_and_padding_on_the_right(examples: list[Example]) -> None:
    batch = collate(examples, PAD)
    check_rows(batch.source_BS, batch.source_real_BS, [example.source for example in examples])
    check_rows(batch.inputs_BT, batch.inputs_real_BT, [example.inputs for example in examples])
    for targets_T, made in zip(batch.targets_BT, examples, strict=True):
        assert targets_T.tolist()[: len(made.targets)] == made.targets.tolist()
        assert set(targets_T.tolist()[len(made.targets) :]) <= {IGNORED}
    read = batch.source_BS if batch.inputs_BT is None else batch.inputs_BT
    assert read is not None and read.shape == batch.targets_BT.shape
    prefixes = [example.prefix for example in examples]
    assert (batch.prefix_B is None) == (sum(prefixes) == 0)
    assert batch.prefix_B is None or batch.prefix_B.tolist() == prefixes
    assert (batch.tokens, batch.samples) == (sum(example.tokens for example in examples), len(examples))
    assert batch.loss_positions == sum(int(np.sum(example.targets != IGNORED)) for example in examples)


def check_rows(ids: Tensor | None, real: Tensor | None, rows: Sequence[Integers | None]) -> None:
    expected = [row.tolist() for row in rows if row is not None]
    if not expected:
        assert ids is None and real is None
        return
    assert ids is not None and ids.dtype == torch.int64
    width = max(map(len, expected))
    assert ids.tolist() == [row + [PAD] * (width - len(row)) for row in expected]
    if min(map(len, expected)) == width:
        assert real is None  # attention without a mask has faster paths
    else:
        assert real is not None and real.dtype == torch.bool
        assert real.tolist() == [[place < len(row) for place in range(width)] for row in expected]


@pytest.mark.parametrize("like", [example(source=5), example(inputs=6, prefix=6), example(source=4, inputs=3)])
def test_no_examples_make_a_batch_of_weight_zero(like: Example) -> None:
    batch, shape = collate([], PAD, like), collate([like], PAD)
    assert (batch.tokens, batch.samples, batch.loss_positions) == (0, 0, 0)
    assert batch.targets_BT.shape == shape.targets_BT.shape
    assert torch.all(batch.targets_BT == IGNORED)
    for empty, full in ((batch.source_BS, shape.source_BS), (batch.inputs_BT, shape.inputs_BT)):
        assert (empty is None) == (full is None)
        assert empty is None or full is None or (empty.shape == full.shape and torch.all(empty == PAD))
    assert batch.source_real_BS is batch.inputs_real_BT is batch.prefix_B is None


def test_an_empty_batch_needs_a_shape_and_a_batch_one_family() -> None:
    with pytest.raises(AssertionError, match="no examples"):
        collate([], PAD)
    with pytest.raises(AssertionError, match="families"):
        collate([example(source=3), example(source=3, inputs=3)], PAD)


FULL = [example(source=3, inputs=4, prefix=2), example(source=5, inputs=2)]


def tensors(batch: Batch) -> dict[str, Tensor]:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def test_all_of_a_batch_moves_to_a_device() -> None:
    batch = collate(FULL, PAD)
    moved = batch.to("meta", non_blocking=True)
    assert len(tensors(moved)) == 6
    assert {tensor.device.type for tensor in tensors(moved).values()} == {"meta"}
    assert {tensor.device.type for tensor in tensors(batch).values()} == {"cpu"}
    assert (moved.tokens, moved.samples) == (batch.tokens, batch.samples)
    alone = collate([example(source=3)], PAD).to(torch.device("meta"))
    assert list(tensors(alone)) == ["source_BS", "targets_BT"]


def test_all_of_a_batch_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor + 1000)  # pinning itself needs a GPU
    batch = collate(FULL, PAD)
    pinned = tensors(batch.pin_memory())
    assert len(pinned) == 6
    assert all(torch.equal(pinned[name], tensor + 1000) for name, tensor in tensors(batch).items())


def test_a_loader_in_another_process_gives_the_same_batch() -> None:
    loader: DataLoader[Any] = DataLoader(Examples(), batch_size=2, collate_fn=partial(collate, pad=PAD), num_workers=1)
    (batch,) = loader
    expected = tensors(collate(FULL, PAD))
    assert tensors(batch).keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors(batch).items())


class Examples(Dataset[Example]):
    def __len__(self) -> int:
        return len(FULL)

    def __getitem__(self, number: int) -> Example:
        return FULL[number]
