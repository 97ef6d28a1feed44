"""Windows: every token once an epoch, and every token with its own document."""

import pickle
import tempfile
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.shard import Stream, write_shard
from pipeline.data.windows import Windows, epoch_order

SHARDS = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=4)
"""The lengths of the documents in each shard."""


def stream_of(folder: Path, shards: list[list[int]]) -> Stream:
    """A stream whose ids are 0, 1, 2, … so that a token is known wherever it turns up."""
    numbers = count()

    def encode(text: str) -> Iterator[bytes]:
        yield np.array([next(numbers) for _ in text], "<u4").tobytes()

    return Stream(
        [
            write_shard(folder / f"{place}.bin", 4, "0" * 64, [("", "x" * length) for length in lengths], encode)
            for place, lengths in enumerate(shards)
        ]
    )


@settings(max_examples=60, deadline=None)
@given(SHARDS, st.integers(1, 40), st.booleans(), st.integers(0, 3))
def test_an_epoch_visits_every_token_once_and_knows_its_document(
    shards: list[list[int]], length: int, within_documents: bool, epoch: int
) -> None:
    documents = [number for number, size in enumerate(chain(*shards)) for _ in range(size)]
    with tempfile.TemporaryDirectory() as folder:
        stream = stream_of(Path(folder), shards)
        windows = Windows(stream, length, within_documents=within_documents)
        order = epoch_order(len(windows), seed=1, epoch=epoch).tolist()
        visited = [windows[number] for number in order]
        known = [windows.documents(number).tolist() for number in order]
    seen = np.concatenate(visited)
    assert sorted(seen.tolist()) == list(range(len(documents)))
    for window, found in zip(visited, known, strict=True):
        own = [documents[token] for token in window]
        assert 1 <= len(window) <= length and found == [document - own[0] for document in own]
        assert not within_documents or len(set(own)) == 1


@settings(max_examples=60, deadline=None)
@given(SHARDS, st.integers(1, 40))
def test_only_the_last_window_of_what_is_cut_is_shorter(shards: list[list[int]], length: int) -> None:
    sizes = list(chain(*shards))
    with tempfile.TemporaryDirectory() as folder:
        stream = stream_of(Path(folder), shards)
        across = [len(window) for window in Windows(stream, length)]
        within = [len(window) for window in Windows(stream, length, within_documents=True)]
    assert across == cut_lengths(sum(sizes), length)
    assert within == [part for size in sizes for part in cut_lengths(size, length)]


def cut_lengths(size: int, length: int) -> list[int]:
    full, rest = divmod(size, length)
    return [length] * full + [rest] * (rest > 0)


@settings(max_examples=60, deadline=None)
@given(SHARDS, st.data())
def test_any_range_is_read_across_shards(shards: list[list[int]], data: st.DataObject) -> None:
    total = sum(map(sum, shards))
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    with tempfile.TemporaryDirectory() as folder:
        stream = stream_of(Path(folder), shards)
        assert len(stream) == total
        assert stream.read(start, stop).tolist() == list(range(start, stop))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 10), (3, 3), (5, 2)])
def test_what_is_not_there_is_not_read(tmp_path: Path, start: int, stop: int) -> None:
    with pytest.raises(IndexError, match="of 9"):
        stream_of(tmp_path, [[4, 5]]).read(start, stop)


@pytest.mark.parametrize("number", [-1, 3])
def test_windows_end(tmp_path: Path, number: int) -> None:
    windows = Windows(stream_of(tmp_path, [[4, 5]]), 4)
    assert len(list(windows)) == len(windows) == 3
    with pytest.raises(IndexError, match="of 3"):
        windows[number]


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    orders = {(seed, epoch): tuple(epoch_order(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(set(orders.values())) == 9
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert all(tuple(epoch_order(50, *key)) == order for key, order in orders.items())


def test_another_process_gets_the_same_windows_without_the_tokens(tmp_path: Path) -> None:
    windows = Windows(stream_of(tmp_path, [[30_000], [30_000]]), 1_000, within_documents=True)
    before = windows[29].tolist()
    sent = pickle.dumps(windows)
    assert len(sent) < 2_000
    assert pickle.loads(sent)[29].tolist() == before


def test_a_window_has_at_least_one_token(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="windows of 0 tokens"):
        Windows(stream_of(tmp_path, [[4]]), 0)
