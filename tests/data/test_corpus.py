"""Documents found, read, compared and split."""

import csv
import gzip
import json
import os
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli
from pipeline.data.cleaning import Notes
from pipeline.data.config import CorpusConfig
from pipeline.data.corpus import SPLITS, Corpus, read_part, scan
from pipeline.data.sources import sources
from pipeline.errors import UserError
from tests.novels import novel


def config(*corpus: Path | str, workers: int = 1, **settings: object) -> CorpusConfig:
    return CorpusConfig(corpus=[str(item) for item in corpus], workers=workers, **settings)  # type: ignore[arg-type]


def write_novels(folder: Path, count: int = 12) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(count):
        (folder / f"book-{seed:02}.txt").write_text(novel(seed), encoding="utf-8")
    return folder


def splits(corpus: Corpus) -> dict[str, tuple[str, ...]]:
    return {entry.name: tuple(part.split for part in entry.parts) for entry in corpus.entries}


# --- Where text comes from ---


def test_folders_files_archives_and_tables_give_the_same_documents(tmp_path: Path) -> None:
    texts = [novel(seed) for seed in range(4)]
    folder = tmp_path / "books" / "deep"
    folder.mkdir(parents=True)
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    (tmp_path / "books" / "notes.pdf").write_bytes(b"%PDF not read")
    (tmp_path / "books" / ".hidden.txt").write_text("not read")
    for number, text in enumerate(texts):
        with gzip.open(tmp_path / f"{number}.txt.gz", "wt") as packed:
            packed.write(text)
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for number, text in enumerate(texts):
            archive.writestr(f"{number}.txt", text)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n\n" for text in texts))
    with (tmp_path / "rows.csv").open("w", newline="") as opened:
        csv.writer(opened).writerows([["id", "text"], *([number, text] for number, text in enumerate(texts))])
    with gzip.open(tmp_path / "rows.tsv.gz", "wt", newline="") as opened:
        csv.writer(opened, delimiter="\t").writerows([["text"], *([text] for text in texts)])
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "rows.parquet")
    for corpus in ("books", "*.txt.gz", "all.zip", "rows.jsonl", "rows.csv", "rows.tsv.gz", "rows.parquet"):
        assert [source.read(Notes()) for source in sources(config(tmp_path / corpus))] == texts, corpus


def test_names_do_not_depend_on_where_the_corpus_is(tmp_path: Path) -> None:
    one, other = write_novels(tmp_path / "a"), write_novels(tmp_path / "b" / "c")
    assert scan(config(one)).fingerprint == scan(config(other)).fingerprint
    assert [source.name for source in sources(config(one))][:2] == ["book-00.txt", "book-01.txt"]


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    folder = write_novels(tmp_path / "books", 2)
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    assert len(list(sources(config(folder)))) == 2


def test_a_folder_goes_by_its_own_name_whatever_links_lead_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of several links by the first, in whatever order the file system lists them."""
    books, walk = tmp_path / "books", os.walk
    write_novels(books / "b" / "real", 1)
    (books / "a").symlink_to(books / "b", target_is_directory=True)
    (books / "c" / "deep").mkdir(parents=True)
    (books / "c" / "deep" / "real").symlink_to(books / "b" / "real", target_is_directory=True)
    write_novels(tmp_path / "outside", 1)
    for name in ("e", "d"):
        (books / name).symlink_to(tmp_path / "outside", target_is_directory=True)

    def listed(*arguments: Any, reverse: bool, **more: Any) -> Any:
        for root, folders, files in walk(*arguments, **more):
            folders.sort(reverse=reverse)
            yield root, folders, files

    for reverse in (False, True):
        monkeypatch.setattr(os, "walk", partial(listed, reverse=reverse))
        assert [source.name for source in sources(config(books))] == ["b/real/book-00.txt", "d/book-00.txt"]


def test_what_a_glob_matches_twice_is_read_once(tmp_path: Path) -> None:
    folder = write_novels(tmp_path / "books", 2)
    (folder / "more").mkdir()
    (folder / "more" / "book-09.txt").write_text(novel(9))
    (folder / "pictures").mkdir()
    (folder / "pictures" / "cover.png").write_bytes(b"")
    for corpus, count in ((folder, 3), (folder / "**" / "*.txt", 3), (folder / "*", 3), (tmp_path / "b*" / "**", 4)):
        found = [source.name for source in sources(config(corpus, deduplicate=False))]
        assert len(found) == len(set(found)) == count, corpus  # of ** the picture is matched by itself
    with pytest.raises(UserError, match="no text in this folder"):
        list(sources(config(folder / "pict*")))


def test_a_file_name_of_any_bytes_can_be_read_and_shown(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9\nnew.txt")).write_text(novel(1))
    (source,) = sources(config(tmp_path))
    assert source.name == "caf��new.txt" and source.read(Notes()) == novel(1)


def test_huggingface_datasets_from_a_folder(tmp_path: Path) -> None:
    rows = [{"text": novel(seed)} for seed in range(3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "test.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert len(list(sources(config(f"hf:{tmp_path}")))) == 3
    assert len(list(sources(config(f"hf:{tmp_path}?split=test")))) == 1
    changed = {"text": novel(9)}  # same size and time would fool a cache
    (tmp_path / "test.jsonl").write_text(json.dumps(changed) + "\n")
    (source,) = sources(config(f"hf:{tmp_path}?split=test", streaming=True))
    assert source.read(Notes()) == novel(9)


def test_huggingface_datasets_saved_to_disk(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list([{"review": novel(1)}]).save_to_disk(tmp_path / "saved")
    (source,) = sources(config(f"hf:{tmp_path / 'saved'}", text_column="review"))
    assert source.read(Notes()) == novel(1)


def test_limit_reads_so_many_documents(tmp_path: Path) -> None:
    corpus = scan(config(write_novels(tmp_path), limit=3))
    assert [entry.name for entry in corpus.entries] == ["book-00.txt", "book-01.txt", "book-02.txt"]
    assert len(scan(config(tmp_path, limit=2**63)).entries) > 3


# --- What is dropped ---


def test_copies_and_editions_are_dropped_and_empty_files_counted(tmp_path: Path) -> None:
    write_novels(tmp_path, 3)
    (tmp_path / "copy.txt").write_text("\r\n".join(novel(0).split("\n")), newline="")
    (tmp_path / "edition.txt").write_text(novel(1).replace("“", '"').replace("captain", "skipper"))
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "picture.txt").write_bytes(bytes(range(256)) * 9)
    dropped = {entry.name: entry.dropped for entry in scan(config(tmp_path)).entries if entry.dropped}
    assert dropped["copy.txt"] == "a copy of book-00.txt"
    assert dropped["edition.txt"].endswith("% the same as book-01.txt")
    assert dropped["empty.txt"] == "empty" and dropped["picture.txt"] == "not text (binary data)"
    assert len(dropped) == 4


def test_repeated_passages_are_left_out_of_the_text(tmp_path: Path) -> None:
    first, second = novel(1), novel(2)
    passage = first.splitlines()[4]
    (tmp_path / "a.txt").write_text(first)
    (tmp_path / "b.txt").write_text(second + passage + "\n" + "end of b\n")
    corpus = scan(config(tmp_path, validation_books=["a"]))
    texts = {entry.name: read_part(source, entry, entry.parts[0].split) for source, entry in corpus.pairs()}
    assert texts == {"a.txt": first, "b.txt": second + "end of b\n"}
    assert [entry.parts[0].bytes for entry in corpus.entries] == [len(text.encode()) for text in texts.values()]


def test_without_deduplication_everything_stays_but_editions_share_a_split(tmp_path: Path) -> None:
    write_novels(tmp_path, 20)
    for seed in range(20):
        (tmp_path / f"edition-{seed:02}.txt").write_text(novel(seed).replace("captain", "skipper"))
    corpus = scan(config(tmp_path, deduplicate=False, validation_fraction=0.5))
    found = splits(corpus)
    assert len(found) == 40 and all(found.values())
    assert all(found[f"book-{seed:02}.txt"] == found[f"edition-{seed:02}.txt"] for seed in range(20))
    assert corpus.leaks["validation"] < 0.01


# --- Splits ---


def test_the_split_of_a_book_does_not_depend_on_the_others(tmp_path: Path) -> None:
    write_novels(tmp_path, 30)
    every = splits(scan(config(tmp_path, validation_fraction=0.2, test_fraction=0.2)))
    some = splits(scan(config(tmp_path / "book-[01]*.txt", validation_fraction=0.2, test_fraction=0.2)))
    assert all(every[name] == split for name, split in some.items())
    counts = {split: list(every.values()).count((split,)) for split in ("train", "validation", "test")}
    assert all(2 <= counts[split] <= 12 for split in ("validation", "test")) and sum(counts.values()) == 30


def test_books_can_be_held_out_by_name(tmp_path: Path) -> None:
    found = splits(scan(config(write_novels(tmp_path), validation_books=["BOOK-03*"], test_books=["book-07.txt"])))
    assert found["book-03.txt"] == ("validation",) and found["book-07.txt"] == ("test",)


def test_an_edition_held_out_by_name_takes_the_other_with_it(tmp_path: Path) -> None:
    write_novels(tmp_path, 4)
    (tmp_path / "zz-edition.txt").write_text(novel(0).replace("captain", "skipper"))
    found = splits(scan(config(tmp_path, validation_books=["zz-edition"])))
    assert found == {f"book-0{n}.txt": ("validation",) if n == 0 else ("train",) for n in range(4)} | {
        "zz-edition.txt": ()
    }


def test_a_collection_ties_the_books_it_contains_to_one_split(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(novel(1))
    (tmp_path / "b.txt").write_text(novel(2))
    (tmp_path / "other.txt").write_text(novel(3))
    (tmp_path / "z-collection.txt").write_text(novel(1) + novel(2) + novel(4, 60))
    corpus = scan(config(tmp_path, validation_books=["b"], deduplicate=False))
    assert splits(corpus) == {name: ("train",) if name == "other.txt" else ("validation",) for name in splits(corpus)}
    assert corpus.leaks["validation"] == 0


def test_a_copy_of_another_edition_counts_when_it_is_named(tmp_path: Path) -> None:
    edition = novel(1).replace("captain", "skipper")
    for name, text in {"a": novel(1), "b": edition, "c": edition, "d": novel(2)}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    found = splits(scan(config(tmp_path, validation_books=["c"])))
    assert found == {"a.txt": ("validation",), "b.txt": (), "c.txt": (), "d.txt": ("train",)}


def test_a_longer_work_is_not_dropped_for_the_part_it_contains(tmp_path: Path) -> None:
    (tmp_path / "a-part-one.txt").write_text(novel(1, 40))
    (tmp_path / "b-whole.txt").write_text(novel(1, 40) + novel(2, 30))
    corpus = scan(config(tmp_path))
    assert [entry.dropped for entry in corpus.entries] == ["", ""]
    assert "".join(corpus.texts("train")) + "".join(corpus.texts("validation")) != ""
    words = sum(len(text.split()) for split in SPLITS for text in corpus.texts(split))
    assert words == len((novel(1, 40) + novel(2, 30)).split())


def test_a_document_of_nothing_but_repeated_passages_is_dropped(tmp_path: Path) -> None:
    lines = novel(1, 60).splitlines(keepends=True)
    (tmp_path / "a.txt").write_text("".join(lines))
    (tmp_path / "b.txt").write_text("".join(lines[30:33]))
    dropped = {entry.name: entry.dropped for entry in scan(config(tmp_path)).entries}
    assert dropped == {"a.txt": "", "b.txt": "all of it has stood before"}


def test_no_part_is_ever_empty(tmp_path: Path) -> None:
    rows = ["word", "two words", "long" * 30, " ".join(["w"] * 39 + ["x" * 200]), " ".join(["w"] * 60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    corpus = scan(config(tmp_path, validation_fraction=0.0))
    parts = [read_part(source, entry, part.split) for source, entry in corpus.pairs() for part in entry.parts]
    assert all(part.strip() for part in parts) and len(parts) == 7


def test_without_validation_books_the_end_of_each_book_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "only.txt").write_text(novel(1, 100))
    (corpus := scan(config(tmp_path)))
    assert splits(corpus) == {"only.txt": ("train", "validation")}
    ((source, entry),) = corpus.pairs()
    train, validation = read_part(source, entry, "train"), read_part(source, entry, "validation")
    assert train + validation == novel(1, 100) and train.endswith("\n")
    assert 0.02 < len(validation) / len(train) < 0.06
    assert capsys.readouterr().err.count("\n") == 1


def test_ends_that_are_too_short_to_be_held_out_are_not_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"a short row {n}"}) + "\n" for n in range(9)))
    corpus = scan(config(tmp_path, validation_fraction=0.0, deduplicate=False))
    assert set(splits(corpus).values()) == {("train",)} and capsys.readouterr().err == ""


def test_no_end_is_held_out_that_stands_in_another_document(tmp_path: Path) -> None:
    """Dialogue, whose lines are too short to be found one by one: a collection holds all of a book."""
    short = "\n".join(sentence for sentence in novel(1, 60).replace(". ", ".\n").splitlines() if sentence) + "\n"
    (tmp_path / "a-book.txt").write_text(short)
    (tmp_path / "other.txt").write_text(novel(2, 60))
    (tmp_path / "z-collection.txt").write_text(short + novel(3, 60))
    found = splits(scan(config(tmp_path, validation_fraction=0.0)))
    assert found == {
        "a-book.txt": ("train",), "other.txt": ("train", "validation"), "z-collection.txt": ("train",)
    }  # fmt: skip


def test_books_that_share_text_cannot_be_named_for_two_splits(tmp_path: Path) -> None:
    write_novels(tmp_path, 4)
    (tmp_path / "zz-edition.txt").write_text(novel(0).replace("captain", "skipper"))
    with pytest.raises(UserError, match=r"test_books: zz-edition.txt shares text with a book of another split"):
        scan(config(tmp_path, validation_books=["book-00"], test_books=["zz-edition"]))


def test_a_name_with_brackets_is_found_as_it_is(tmp_path: Path) -> None:
    write_novels(tmp_path, 3)
    (tmp_path / "Emma [1815].txt").write_text(novel(9))
    assert splits(scan(config(tmp_path, validation_books=["Emma [1815]"])))["Emma [1815].txt"] == ("validation",)


def test_one_and_two_processes_find_the_same(tmp_path: Path) -> None:
    folder = write_novels(tmp_path)
    one, two = scan(config(folder)), scan(config(folder, workers=2))
    assert one.entries == two.entries and one.fingerprint == two.fingerprint
    assert list(one.texts("train")) == list(two.texts("train"))


def test_changed_text_changes_the_fingerprint_and_is_noticed_while_reading(tmp_path: Path) -> None:
    folder = write_novels(tmp_path)
    corpus = scan(config(folder))
    path = folder / "book-05.txt"
    before = path.stat()
    path.write_text(path.read_text().replace("the", "teh"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UserError, match="book-05.txt: the text changed"):
        list(corpus.texts(next(entry for entry in corpus.entries if entry.name == "book-05.txt").parts[0].split))
    assert scan(config(folder)).fingerprint != corpus.fingerprint


# --- Mistakes ---


FILES = {
    "empty.txt": b"",
    "x.bin": bytes(range(256)) * 9,
    "x.zip": b"no zip",
    "cut.txt.gz": gzip.compress(novel(1).encode())[:-20],
    "novels.tar.gz": gzip.compress(bytes(512) + novel(1).encode()),
    "column.jsonl": b'{"text": "a"}\n{"txt": "b"}\n',
    "number.jsonl": b'{"text": 3}\n',
    "broken.jsonl": b'{"text": "a"}\n{oops\n',
    "list.jsonl": b"[1]\n",
    "body.csv": b"body\nwords\n",
    "cells.csv": b"text,label\nHello, world,1\n",
    "quote.tsv": b'text\tlabel\n"Tis but a scratch\t1\nmore\t0\n',
    "latin.csv": "text\ncafé\n".encode("latin-1"),
    "x.parquet": b"PAR0",
    "bomb.txt.gz": gzip.compress(bytes(2**27), 1),
    "unread/x.pdf": b"",
    "book.txt": novel(1).encode(),
}


@pytest.mark.parametrize(
    ("corpus", "settings", "message"),
    [
        ("nowhere", {}, "no file, folder or catalogue entry"),
        ("*.nothing", {}, "nothing matches"),
        ("empty.txt", {}, "no text to use: empty.txt: empty"),
        ("x.bin", {}, "no text to use: x.bin: not text"),
        ("x.zip", {}, "not a zip archive"),
        ("cut.txt.gz", {}, "damaged archive"),
        ("novels.tar.gz", {}, "novels.tar.gz: an archive of a kind that is not read; unpack it"),
        ("column.jsonl", {}, "column.jsonl row 2: no column 'text'; it has txt"),
        ("number.jsonl", {}, "holds 3, not text"),
        ("broken.jsonl", {}, "broken.jsonl line 2: not valid JSON"),
        ("list.jsonl", {}, "list.jsonl line 1: expected an object"),
        ("body.csv", {}, "no column 'text'; it has body"),
        ("latin.csv", {}, "a table must be UTF-8"),
        ("cells.csv", {}, "cells.csv row 1: more cells than the header has"),
        ("quote.tsv", {}, "quote.tsv: not a valid table"),
        ("locked.zip", {}, "locked.zip/a.txt: damaged archive"),
        ("x.parquet", {}, "not a Parquet file"),
        ("bomb.txt.gz", {}, "bomb.txt.gz: unpacks to more than 50 times its size"),
        ("unread", {}, "no text in this folder"),
        ("book.txt", {"validation_books": ["nobody"]}, "no document matches 'nobody'"),
        ("book.txt", {"validation_books": ["book"]}, "take every document"),
        ("hf:no-such/dataset", {}, "hf:no-such/dataset: cannot be fetched"),
        ("hf:.?splt=train", {}, "unknown option 'splt'"),
    ],
)
def test_mistakes_are_one_line_with_exit_code_2(
    corpus: str,
    settings: dict[str, list[str]],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    with zipfile.ZipFile(tmp_path / "locked.zip", "w") as archive:
        archive.writestr("a.txt", "secret")
    packed = bytearray((tmp_path / "locked.zip").read_bytes())
    packed[6] |= 1  # the flag of an encrypted member, here and in the directory
    packed[packed.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "locked.zip").write_bytes(packed)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    options = [f"--{key}={value}" for key, values in settings.items() for value in values]
    assert cli.main(["corpus", "inspect", corpus, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
