"""Copies, editions and leaks."""

import random
import subprocess
import sys

import numpy as np

from pipeline.data.duplicates import leak, overlaps, passages, repeated, sample
from tests.novels import novel


def edited(text: str, share: float, seed: int = 0) -> str:
    """Another edition: some words spelt differently, other punctuation."""
    draw = random.Random(seed)
    words = [word[::-1] if draw.random() < share else word for word in text.split(" ")]
    return " ".join(words).replace("“", '"').replace("”", '"').upper()


def exact_share(shorter: str, longer: str) -> float:
    """The containment of eight-word sequences, computed in the plainest way."""
    import re

    def shingles(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return set(zip(*(words[offset:] for offset in range(8)), strict=False))

    return len(shingles(shorter) & shingles(longer)) / len(shingles(shorter))


def test_editions_are_found_and_different_books_are_not() -> None:
    books = [novel(1, 300), novel(2, 300), edited(novel(1, 300), 0.01), novel(3, 30), edited(novel(3, 30), 0.02)]
    found = overlaps([sample(book) for book in books])
    assert [(item.first, item.second, item.same) for item in found] == [(0, 2, True), (3, 4, True)]


def test_the_share_is_estimated_well() -> None:
    book = novel(5, 600)
    other = edited(book, 0.03)
    (found,) = overlaps([sample(book), sample(other)])
    assert abs(found.share - exact_share(book, other)) < 0.08


def test_a_collection_that_contains_a_book_is_related_but_not_the_same() -> None:
    for paragraphs in (40, 100):  # sampled more densely than the collection, or alike
        collection = novel(1, paragraphs) + novel(2, 900)
        (found,) = overlaps([sample(collection), sample(novel(1, paragraphs))])
        assert not found.same and found.share > 0.95


def test_samples_do_not_depend_on_the_hash_seed() -> None:
    code = "from pipeline.data.duplicates import sample; print(sample('one two three four five six ' * 900).tolist())"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


def test_leak_is_the_share_of_held_out_text_seen_in_training() -> None:
    held_out = novel(1, 200) + novel(2, 200)
    assert leak([sample(held_out)], [sample(novel(3, 200))]) == 0
    half = leak([sample(held_out)], [sample(novel(1, 200)), sample(novel(4, 200))])
    assert half is not None and abs(half - 0.5) < 0.1
    assert leak([sample("three words only")], [sample(novel(3, 200))]) is None


def test_passages_that_come_again_are_found_where_they_stand() -> None:
    long = "x" * 250
    texts = [f"short\n{long}1\n{long}2\n", f"{long}2\nshort\n{long}3\n{long}3\n", "short\n"]
    result = repeated([passages(text) for text in texts])
    assert [lines for lines, _ in result] == [(), (0, 3), ()]
    assert result[1][1] == 2 * 252  # the line and its newline


def test_empty_text_has_an_empty_sample() -> None:
    assert sample("").size == 0 and passages("").lines.size == 0
    assert overlaps([sample(""), sample("a b c")]) == []
    assert sample("one two three").dtype == np.uint64
