"""Raw bytes to clean text."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.cleaning import Notes, clean, decode
from tests.novels import hard_wrapped, novel, paragraph

TEXT = "Señor Müller’s café — “naïve” … œuvre\n" * 20


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252"])
def test_every_encoding_gives_the_same_text(encoding: str) -> None:
    notes = Notes()
    assert decode(TEXT.encode(encoding), notes) == TEXT
    assert (notes.encoding != "utf-8") == (encoding not in ("utf-8", "utf-8-sig"))


def test_bytes_without_meaning_in_cp1252_are_latin_1() -> None:
    notes = Notes()
    assert decode("é\x81é\n".encode("latin-1") * 9, notes) == "é\x81é\n" * 9
    assert notes.encoding == "latin-1"


def test_one_meaningless_byte_does_not_cost_the_quotes() -> None:
    notes = Notes()
    text = decode(("He didn’t say “no” — café.\n" * 9).encode("cp1252") + b"\x9d", notes)
    assert text is not None and clean(text, Notes()) == "He didn’t say “no” — café.\n" * 9
    assert notes.encoding == "latin-1"


def test_damaged_utf_8_stays_utf_8() -> None:
    notes = Notes()
    text = decode(TEXT.encode() + b"\xe9 \xff\n" + TEXT.encode(), notes)
    assert text is not None and text.count("café") == 40
    assert (notes.encoding, notes.replaced) == ("utf-8", 2)


@pytest.mark.parametrize("data", [bytes(range(256)) * 40, b"\x89PNG\r\n\x1a\n" + b"\x00\x01\x02" * 100, b"\x00" * 999])
def test_binary_data_is_no_text(data: bytes) -> None:
    assert decode(data, Notes()) is None


def test_binary_data_behind_a_text_header_is_no_text() -> None:
    assert decode(b"plain words " * 10_000 + bytes(range(32)) * 20_000, Notes()) is None


@given(st.binary(max_size=300))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    text = decode(data, Notes())
    assert text is None or isinstance(clean(text, Notes()), str)


def test_line_ends_marks_and_control_characters() -> None:
    notes = Notes()
    assert clean("\ufeffOne\r\ntwo\vthree\x00 \x07four\x1a\tfive\n\n\n\n\nsix  \n\n", notes) == (
        "One\ntwo\nthree four\tfive\n\nsix\n"
    )
    assert notes.controls == 4


def test_clean_text_stays_as_it_is() -> None:
    text = novel(1)
    assert clean(text, Notes()) == text


@given(st.text(max_size=400))
def test_cleaning_twice_changes_nothing_more(text: str) -> None:
    once = clean(text, Notes())
    assert clean(once, Notes()) == once


# --- Project Gutenberg ---

HEADER = """The Project Gutenberg EBook of A Winter Crossing, by Nobody

This eBook is for the use of anyone anywhere at no cost.

Title: A Winter Crossing

*** START OF THIS PROJECT GUTENBERG EBOOK A WINTER CROSSING ***

Produced by Two Volunteers and the
Online Team

"""
LICENCE = """
End of the Project Gutenberg EBook of A Winter Crossing, by Nobody

*** END OF THIS PROJECT GUTENBERG EBOOK A WINTER CROSSING ***

***** This file should be named 12345.txt *****

*** START: FULL LICENSE ***

THE FULL PROJECT GUTENBERG LICENSE
PLEASE READ THIS BEFORE YOU DISTRIBUTE OR USE THIS WORK
"""
OLD_HEADER = """**The Project Gutenberg Etext of A Winter Crossing, by Nobody**

***START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***
Why is this "Small Print!" statement here?  You know: lawyers.
*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*

"""
BOOK = novel(7)


@pytest.mark.parametrize(
    "file",
    [
        HEADER + BOOK + LICENCE,
        OLD_HEADER + BOOK + "\nEnd of The Project Gutenberg Etext of A Winter Crossing\n",
        "Some unknown front matter\n\n*** START OF THE PROJECT GUTENBERG EBOOK X ***\n" + BOOK,
        "*** END OF THE PROJECT GUTENBERG EBOOK Y ***\n\n" + OLD_HEADER.split("\n\n", 1)[1] + BOOK,
        BOOK + LICENCE,
    ],
    ids=["new", "old", "no-title", "end-mark-before-the-text", "licence-only"],
)
def test_notices_are_removed_and_the_book_is_kept_whole(file: str) -> None:
    notes = Notes()
    assert clean(file, notes) == BOOK
    assert notes.notice_lines > 0


def test_notices_between_books_in_one_file() -> None:
    other = novel(8)
    cleaned = clean(HEADER + BOOK + LICENCE + "\n" + HEADER.replace("Winter", "Summer") + other + LICENCE, Notes())
    assert [line for line in cleaned.split("\n") if line] == (BOOK + other).splitlines()


def test_a_book_after_the_last_end_mark_is_not_thrown_away() -> None:
    long_book = novel(9, paragraphs=300)
    cleaned = clean("*** END OF THE PROJECT GUTENBERG EBOOK Z ***\nThis etext is small print.\n\n" + long_book, Notes())
    assert cleaned.strip() == long_book.strip()


def test_a_short_book_after_an_end_mark_is_not_thrown_away() -> None:
    file = "*** END OF THE PROJECT GUTENBERG EBOOK Z ***\nThis etext is small print.\n\n" + BOOK
    assert clean(file, Notes()).strip() == BOOK.strip()


def test_two_start_marks_keep_both_stories() -> None:
    mark = "*** START OF THE PROJECT GUTENBERG EBOOK {} ***\n"
    cleaned = clean("front matter\n" + mark.format("A") + novel(1, 5) + mark.format("B") + novel(2, 5), Notes())
    assert [line for line in cleaned.split("\n") if line] == (novel(1, 5) + novel(2, 5)).splitlines()


def test_a_novel_that_mentions_the_project_keeps_its_sentences() -> None:
    text = BOOK + "He had read it at Project Gutenberg, and the end of the project came soon.\n" + BOOK
    assert clean(text, Notes()) == text


# --- Hard-wrapped lines ---


@pytest.mark.parametrize("width", [50, 65, 72, 78])
def test_wrapped_prose_becomes_one_line_a_paragraph(width: int) -> None:
    text = novel(3, paragraphs=60)
    notes = Notes()
    assert clean(hard_wrapped(text, width), notes) == text
    assert notes.joined_lines > 60


def test_dashes_at_a_line_end_close_up() -> None:
    prose = "".join(line + "\n" for line in hard_wrapped(novel(3)).splitlines())
    text = prose + "\nShe waited for the captain in the grey morning, and then she saw the--\nthe lighthouse fall.\n"
    assert "saw the--the lighthouse fall.\n" in clean(text, Notes())
    assert "saw the – the lighthouse" in clean(text.replace("the--", "the –"), Notes())


VERSE = """The harbour bell was ringing low
When all the boats were home at last,
And over roofs of early snow
The shadows of the gulls went past.
"""


def test_verse_keeps_its_lines_even_inside_prose() -> None:
    assert clean(VERSE * 20, Notes()) == VERSE * 20
    mixed = hard_wrapped(novel(4, 40)) + "\n" + VERSE + "\n" + hard_wrapped(novel(5, 40))
    assert VERSE in clean(mixed, Notes())


def test_blank_verse_of_even_length_keeps_its_lines() -> None:
    draw = random.Random(2)
    words = [
        "And",
        "of",
        "the",
        "dark",
        "unmeasured",
        "deep",
        "below",
        "there",
        "rose",
        "a",
        "sound",
        "of",
        "many",
        "wings",
    ]
    lines = []
    for _ in range(200):
        line = draw.choice(words).capitalize()
        while len(line) < 40:
            line += " " + draw.choice(words).lower()
        lines.append(line)
    text = "\n".join(lines) + "\n"
    assert clean(text, Notes()) == text


def test_indented_paragraphs_without_blank_lines_are_told_apart() -> None:
    draw = random.Random(11)
    blocks = [paragraph(draw) for _ in range(40)]
    import textwrap

    wrapped = "\n".join(textwrap.fill(block, 66, initial_indent="    ", break_on_hyphens=False) for block in blocks)
    assert [line.strip() for line in clean(wrapped, Notes()).splitlines()] == blocks


def test_scene_breaks_survive() -> None:
    text = hard_wrapped(novel(6, 20)) + "\n\n\n" + hard_wrapped(novel(7, 20))
    assert clean(text, Notes()) == novel(6, 20) + "\n" + novel(7, 20)


def test_paragraphs_of_a_script_without_blanks_stay_apart() -> None:
    """In Chinese the next word would be the whole next line, which hardly ever fits."""
    draw = random.Random(3)
    lines = [
        "　　" * (n % 2) + "".join(draw.choices("天地玄黄宇宙洪荒日月", k=draw.randint(12, 100))) for n in range(200)
    ]
    notes = Notes()
    assert clean("\n".join(lines), notes).splitlines() == lines and notes.joined_lines == 0
