"""Small made-up novels for the tests: different for every seed, the same for the same seed."""

import random

SUBJECTS = "the captain|an old sailor|her sister|the young doctor|Mr Harrow|the widow|nobody|the keeper".split("|")
VERBS = "looked at|remembered|followed|dreamt of|had forgotten|laughed about|waited for|wrote to|feared".split("|")
OBJECTS = "the grey sea|a letter|the garden gate|his brother’s watch|the empty house|the storm|a small boat".split("|")
TAILS = "without a word|until the morning|in the rain|as before|for many years|and said nothing|that winter".split("|")


def name(draw: random.Random) -> str:
    return "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(3)).capitalize()


def sentence(draw: random.Random) -> str:
    subject, verb, thing, tail = (draw.choice(words) for words in (SUBJECTS, VERBS, OBJECTS, TAILS))
    text = f"{subject} {name(draw)} {verb} {thing} of {name(draw)} {tail}"
    return text[0].upper() + text[1:] + draw.choice(".!?")


def paragraph(draw: random.Random, sentences: int = 5) -> str:
    text = " ".join(sentence(draw) for _ in range(sentences))
    return f"“{text}”" if draw.random() < 0.3 else text


def novel(seed: int, paragraphs: int = 30) -> str:
    """One paragraph a line, as our corpora are after cleaning."""
    draw = random.Random(seed)
    return "".join(paragraph(draw) + "\n" for _ in range(paragraphs))


def hard_wrapped(text: str, width: int = 70) -> str:
    """The same text as old electronic editions have it: lines of a fixed width, blank lines between paragraphs."""
    import textwrap

    blocks = [
        textwrap.fill(block, width, break_long_words=False, break_on_hyphens=False) for block in text.splitlines()
    ]
    return "\n\n".join(blocks) + "\n"
