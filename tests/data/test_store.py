"""The token store: every token of every document, whatever happens while it is made or after."""

import errno
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from pipeline import tokenizer as tokenizer_module
from pipeline.data import shard as shard_module
from pipeline.data import store as store_module
from pipeline.data.config import CorpusConfig, TokenizerConfig, TokenizerKind
from pipeline.data.corpus import Corpus, read_part, scan
from pipeline.data.shard import HEADER, Shard
from pipeline.data.store import MANIFEST, Store, document_ids, prepare_store
from pipeline.errors import UserError
from pipeline.files import fingerprint, read_json, write_json
from pipeline.tokenizer import Tokenizer, train
from tests.novels import novel

BOOKS = 12
BLANKS = "a   b\n\n\n  a \t b.\n \n"
PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("books")
    for seed in range(BOOKS):
        (folder / f"book-{seed:02}.txt").write_text(novel(seed, paragraphs=6), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer(books: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_tokenizer(tmp_path_factory.mktemp("tokenizer") / "bpe", "bpe", 600)


def saved_tokenizer(folder: Path, kind: TokenizerKind, size: int) -> Path:
    texts = [novel(seed, paragraphs=6) for seed in range(3)]
    train([*texts, BLANKS * 100], TokenizerConfig(kind=kind, vocab_size=size)).save(folder)
    return folder


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard for each book."""
    monkeypatch.setattr(store_module, "LEAST_BYTES", 1000)


def scanned(books: Path, workers: int = 1, held_out: str = "book-0[03]") -> Corpus:
    return scan(CorpusConfig(corpus=[str(books)], workers=workers, validation_books=[held_out]))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def identities(folder: Path) -> dict[str, tuple[int, int]]:
    """What changes when a file is written again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.bin")}


# --- What is in a store ---


def test_a_store_holds_every_document_and_its_end(books: Path, tokenizer: Path, tmp_path: Path) -> None:
    corpus = scanned(books)
    store = prepare_store(corpus, tokenizer, tmp_path)
    loaded = Tokenizer.load(tokenizer)
    assert sum(len(stream.shards) for stream in store.streams.values()) > 4
    found = []
    for split, stream in store.streams.items():
        bounds = stream.document_bounds()
        assert bounds[-1] == len(stream)
        names = [name for shard in stream.shards for name in shard.document_names()]
        sizes = [size for shard in stream.shards for size in shard.document_sizes().tolist()]
        for place, (name, size) in enumerate(zip(names, sizes, strict=True)):
            text = (books / name).read_text(encoding="utf-8")
            ids = stream.read(bounds[place], bounds[place + 1]).tolist()
            assert ids == [*loaded.encode(text), loaded.id("end")]
            assert loaded.decode(ids[:-1]) == text
            assert size == [len(ids), len(text.encode())]
            found.append((name, split))
    assert sorted(found) == [(entry.name, entry.parts[0].split) for entry in corpus.entries]
    assert sorted(name for name, split in found if split == "validation") == ["book-00.txt", "book-03.txt"]
    assert (store.corpus, store.tokenizer) == (corpus.fingerprint, loaded.fingerprint)


def test_the_tail_of_a_document_can_be_validation(books: Path, tokenizer: Path, tmp_path: Path) -> None:
    corpus = scan(CorpusConfig(corpus=[str(books)], workers=1, validation_fraction=0.0))
    store = prepare_store(corpus, tokenizer, tmp_path)
    loaded = Tokenizer.load(tokenizer)
    for split, stream in store.streams.items():
        texts = [read_part(source, entry, split) for source, entry in corpus.pairs()]
        expected = [token for text in texts for token in [*loaded.encode(text), loaded.id("end")]]
        assert stream.read(0, len(stream)).tolist() == expected
        sizes = [size for shard in stream.shards for size in shard.document_sizes()[:, 1].tolist()]
        assert sizes == [len(text.encode()) for text in texts]


def test_one_worker_and_two_write_the_same_bytes(books: Path, tokenizer: Path, tmp_path: Path) -> None:
    one = prepare_store(scanned(books, workers=1), tokenizer, tmp_path / "one")
    two = prepare_store(scanned(books, workers=2), tokenizer, tmp_path / "two")
    assert contents(one.path) == contents(two.path)
    assert one.path.name == two.path.name


def test_rows_of_a_table_make_a_store_too(tokenizer: Path, tmp_path: Path) -> None:
    table = tmp_path / "rows.tsv"
    table.write_text("text\n" + "".join(f"row {number} says {'much ' * number}\n" for number in range(40)))
    config = CorpusConfig(corpus=[str(table)], workers=2, deduplicate=False, validation_books=["*:7"])
    store = prepare_store(scan(config), tokenizer, tmp_path)
    assert [shard.document_names() for shard in store.stream("validation").shards] == [["rows.tsv:7"]]
    assert sum(shard.documents for shard in store.stream("train").shards) == 39


class LargeTokenizer:
    """A tokenizer with more tokens than sixteen bits can count."""

    fingerprint = "ab" * 32
    vocab_size = 70_000

    @classmethod
    def load(cls, _: Path) -> "LargeTokenizer":
        return cls()

    def id(self, _: str) -> int:
        return 0

    def pieces(self, text: str) -> Iterator[str]:
        return iter([text])

    def encode(self, text: str) -> list[int]:
        return [69_000 + len(word) for word in text.split()]


def test_a_large_vocabulary_takes_four_bytes(books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "Tokenizer", LargeTokenizer)
    store = prepare_store(scanned(books), tmp_path, tmp_path)
    text = (books / "book-01.txt").read_text(encoding="utf-8")
    ids = store.stream("train").read(0, len(text.split()) + 1)
    assert ids.dtype == np.uint32
    assert ids.tolist() == [*(69_000 + len(word) for word in text.split()), 0]


def test_an_id_beyond_the_vocabulary_is_never_stored() -> None:
    with pytest.raises(AssertionError, match="an id beyond the vocabulary"):
        store_module.stored([5, 400], vocab_size=400)


# --- Text to ids ---

NASTY = st.text("ab. \n\t") | st.text("ab’é—.!1 \t\n\u00a0\u3000\x85\u2028中😀\u0301<eos>") | st.text()


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    """Our kinds, and one from elsewhere, which may join newlines."""
    folder = tmp_path_factory.mktemp("kinds")
    elsewhere = Backend(models.BPE())
    elsewhere.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(special_tokens=["<|endoftext|>"], show_progress=False)
    elsewhere.train_from_iterator([BLANKS * 100], trainer)
    (folder / "elsewhere").mkdir()
    elsewhere.save(str(folder / "elsewhere" / "tokenizer.json"))
    ours = [saved_tokenizer(folder / kind, kind, 500) for kind in get_args(TokenizerKind)]
    return [Tokenizer.load(path) for path in [*ours, folder / "elsewhere"]]


@settings(deadline=None)
@example(BLANKS, 1)
@given(NASTY, st.integers(1, 20))
def test_the_ids_of_a_text_do_not_depend_on_how_it_is_cut(every_kind: list[Tokenizer], text: str, chunk: int) -> None:
    for tokenizer in every_kind:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenizer_module, "PIECE", chunk)
            stored = b"".join(document_ids(tokenizer, text))
        assert np.frombuffer(stored, "<u2").tolist() == [*tokenizer.library_ids(text), tokenizer.id("end")]


def test_a_text_is_tokenised_a_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "PIECE", 50)
    text = " ".join(f"word{number}" for number in range(500))
    assert max(map(len, tokenizer_module.pieces(text))) < 70


# --- Never stale ---


def test_a_store_is_made_once(books: Path, tokenizer: Path, tmp_path: Path) -> None:
    store = prepare_store(scanned(books), tokenizer, tmp_path)
    before = identities(store.path)
    assert prepare_store(scanned(books), tokenizer, tmp_path).path == store.path
    assert identities(store.path) == before


def test_changed_text_tokenizer_or_split_makes_another_store(books: Path, tokenizer: Path, tmp_path: Path) -> None:
    other_books = tmp_path / "books"
    shutil.copytree(books, other_books)
    (other_books / "book-05.txt").write_text(novel(99))
    other_tokenizer = saved_tokenizer(tmp_path / "other", "bpe", 500)
    stores = [
        prepare_store(scanned(books), tokenizer, tmp_path),
        prepare_store(scanned(other_books), tokenizer, tmp_path),
        prepare_store(scanned(books), other_tokenizer, tmp_path),
        prepare_store(scanned(books, held_out="book-04"), tokenizer, tmp_path),
    ]
    assert len({store.path for store in stores}) == 4
    assert stores[2].stream("train").read(0, 50).tolist() != stores[0].stream("train").read(0, 50).tolist()


def test_another_tokenizer_is_refused(books: Path, tokenizer: Path, tmp_path: Path) -> None:
    store = prepare_store(scanned(books), tokenizer, tmp_path)
    assert Store.open(store.path, store.tokenizer).tokenizer == store.tokenizer
    with pytest.raises(UserError, match=f"made with tokenizer {store.tokenizer[:16]}, not ffffffffffffffff; use"):
        Store.open(store.path, "f" * 64)


def test_text_that_changes_after_the_scan_is_noticed(books: Path, tokenizer: Path, tmp_path: Path) -> None:
    changing = tmp_path / "books"
    shutil.copytree(books, changing)
    corpus = scanned(changing, workers=2)
    (changing / "book-08.txt").write_text(novel(99))
    with pytest.raises(UserError, match=r"book-08.txt.*changed while it was being read; run again"):
        prepare_store(corpus, tokenizer, tmp_path)
    assert not list(tmp_path.rglob("*.tmp"))
    assert not list(tmp_path.rglob(MANIFEST))


def test_a_tokenizer_that_changes_meanwhile_is_noticed(tokenizer: Path) -> None:
    with pytest.raises(UserError, match="the tokenizer changed while the store was being made; run again"):
        store_module.loaded_tokenizer(tokenizer, "f" * 64)


def test_a_split_without_text_is_one_line(books: Path, tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no test text in this store; hold out"):
        prepare_store(scanned(books), tokenizer, tmp_path).stream("test")


# --- Interrupted, full, in company ---

PREPARE = """
import os, signal, sys
from pathlib import Path
from pipeline.data import store
from pipeline.data.config import CorpusConfig
from pipeline.data.corpus import scan
from pipeline.data.parallel import parallel_map

def killed_after_two(*arguments):
    for number, result in enumerate(parallel_map(*arguments)):
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        yield result

if __name__ == "__main__":
    books, tokenizer, output, fate = sys.argv[1:]
    store.LEAST_BYTES = 1000
    if fate == "killed":
        store.parallel_map = killed_after_two
    corpus = scan(CorpusConfig(corpus=[books], workers=2, validation_books=["book-0[03]"]))
    store.prepare_store(corpus, Path(tokenizer), Path(output))
"""


def start_preparing(folder: Path, *arguments: Path | str) -> subprocess.Popen[str]:
    script = folder / "prepare.py"
    script.write_text(PREPARE)
    command = [sys.executable, str(script), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_preparation_goes_on_where_it_was(books: Path, tokenizer: Path, tmp_path: Path) -> None:
    undisturbed = prepare_store(scanned(books), tokenizer, tmp_path / "undisturbed")
    killed = start_preparing(tmp_path, books, tokenizer, tmp_path, "killed")
    killed.communicate(timeout=60)  # its workers have the same standard output: it ends with the last of them
    assert killed.returncode == -9
    folder = tmp_path / undisturbed.path.name
    before = identities(folder)
    assert 2 <= len(before) < len(identities(undisturbed.path))
    assert not (folder / MANIFEST).exists()
    with pytest.raises(UserError, match="no finished token store; run `triptych prepare`"):
        Store.open(folder)
    (folder / ".train-00002.bin.99999.tmp").write_bytes(b"left behind")
    store = prepare_store(scanned(books), tokenizer, tmp_path)
    assert contents(store.path) == contents(undisturbed.path)
    assert before.items() <= identities(store.path).items()


def test_two_processes_make_one_store(books: Path, tokenizer: Path, tmp_path: Path) -> None:
    undisturbed = prepare_store(scanned(books), tokenizer, tmp_path / "undisturbed")
    both = [start_preparing(tmp_path, books, tokenizer, tmp_path, "lives") for _ in range(2)]
    messages = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert "".join(messages).count("preparing the token store") == 1
    assert contents(tmp_path / undisturbed.path.name) == contents(undisturbed.path)


def test_a_full_disk_costs_one_shard(
    books: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = prepare_store(scanned(books), tokenizer, tmp_path / "undisturbed")
    folder = tmp_path / undisturbed.path.name

    def write_header(opened: object, shard: Shard) -> None:
        if len(identities(folder)) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(shard.path))
        original(opened, shard)  # type: ignore[arg-type]

    original = shard_module.write_header
    with monkeypatch.context() as patch:
        patch.setattr(shard_module, "write_header", write_header)
        with pytest.raises(OSError, match="No space left on device"):
            prepare_store(scanned(books), tokenizer, tmp_path)
    before = identities(folder)
    assert len(before) == 2
    assert {path.suffix for path in folder.iterdir()} == {"", ".bin"}
    assert contents(prepare_store(scanned(books), tokenizer, tmp_path).path) == contents(undisturbed.path)
    assert before.items() <= identities(folder).items()


def test_too_little_disk_is_said_before_anything_is_written(
    books: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(UserError, match=r"not enough disk.*0.00 GB are free; make room"):
        prepare_store(scanned(books), tokenizer, tmp_path)
    assert not list(tmp_path.rglob("*.bin"))


def test_shards_that_are_there_need_no_room(
    books: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = prepare_store(scanned(books), tokenizer, tmp_path)
    (store.path / MANIFEST).unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    assert prepare_store(scanned(books), tokenizer, tmp_path).path == store.path


# --- Damaged ---


def changed(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return damage


def overwritten(position: int, new: bytes) -> Callable[[Path], None]:
    return changed(lambda data: data[:position] + new + data[position:][len(new) :])


def swapped(path: Path) -> None:
    """A shard of the same store in the place of another."""
    shutil.copy(path.with_name("train-00000.bin"), path)


def newer(path: Path) -> None:
    """A manifest as a later version of the program may write it."""
    manifest = {**read_json(path), "format": 7}
    del manifest["fingerprint"]
    write_json(path, manifest | {"fingerprint": fingerprint(manifest)})


SHARD = "train-00001.bin"
DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "truncated": (SHARD, changed(lambda data: data[:-2]), "bytes long, its header says"),
    "longer": (SHARD, changed(lambda data: data + b"x"), "bytes long, its header says"),
    "empty": (SHARD, changed(lambda _: b""), "not a token shard, or its header is damaged"),
    "zeroed": (SHARD, changed(lambda data: bytes(len(data))), "not a token shard, or its header is damaged"),
    "missing": (SHARD, Path.unlink, "missing"),
    "an id": (SHARD, overwritten(HEADER.size + 40, b"\xff"), "damaged, its checksum differs"),
    "a name": (SHARD, overwritten(-6, b"X"), "damaged, its checksum differs"),
    "magic": (SHARD, overwritten(0, b"X"), "not a token shard, or its header is damaged"),
    "version": (SHARD, overwritten(8, b"\x02"), "a shard of format 2, this program reads 1"),
    "type": (SHARD, overwritten(12, b"\x03"), "ids of 3 bytes, expected 2 or 4"),
    "count": (SHARD, overwritten(16, b"\x01"), "bytes long, its header says"),
    "tokenizer": (SHARD, overwritten(40, bytes(32)), f"not the shard that {MANIFEST} lists"),
    "checksum": (SHARD, overwritten(72, bytes(32)), f"not the shard that {MANIFEST} lists"),
    "another shard": (SHARD, swapped, f"not the shard that {MANIFEST} lists"),
    "no manifest": (MANIFEST, Path.unlink, "no finished token store"),
    "half a manifest": (MANIFEST, changed(lambda data: data[: len(data) // 2]), "not valid JSON"),
    "a manifest of zeros": (MANIFEST, changed(lambda data: bytes(len(data))), "not valid JSON"),
    "a manifest of another kind": (MANIFEST, changed(lambda _: b"[]"), "its fingerprint differs"),
    "an edited manifest": (MANIFEST, changed(lambda data: data.replace(b"1", b"2")), "its fingerprint differs"),
    "a newer manifest": (MANIFEST, newer, "a store of format 7, this program reads 1"),
}


@pytest.fixture(scope="module")
def pristine(books: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "LEAST_BYTES", 1000)
        yield prepare_store(scanned(books), tokenizer, tmp_path_factory.mktemp("pristine")).path


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_mended(kind: str, pristine: Path, books: Path, tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / pristine.name
    shutil.copytree(pristine, folder)
    before = identities(folder)
    file, damage, message = DAMAGE[kind]
    damage(folder / file)
    with pytest.raises(UserError, match=message) as raised:
        for stream in Store.open(folder).streams.values():
            stream.verify()
    assert str(raised.value).startswith(str(folder)) and "\n" not in str(raised.value)
    mended = prepare_store(scanned(books), tokenizer, tmp_path)
    assert contents(mended.path) == contents(pristine)
    after = identities(folder)
    assert {name for name in before if before[name] != after[name]} <= {file}


def test_damaged_ids_are_never_read(pristine: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    shutil.copytree(pristine, folder)
    overwritten(HEADER.size + 40, b"\xff")(folder / SHARD)
    stream = Store.open(folder).stream("train")
    first = stream.shards[0].tokens
    assert len(stream.read(0, first)) == first
    with pytest.raises(UserError, match=f"{SHARD}: damaged, its checksum differs"):
        stream.read(first - 1, first + 1)


def test_an_index_that_does_not_add_up_is_noticed(pristine: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    shutil.copytree(pristine, folder)
    stream = Store.open(folder).stream("train")
    overwritten(stream.shards[1].index_start, b"\x01")(folder / SHARD)
    with pytest.raises(UserError, match=f"{SHARD}: damaged, its index does not add up"):
        stream.document_bounds()


def test_a_store_can_be_sent_to_another_process(pristine: Path) -> None:
    store = Store.open(pristine)
    expected = store.stream("train").read(0, 100).tolist()
    sent = pickle.dumps(store)
    assert pickle.loads(sent).stream("train").read(0, 100).tolist() == expected
    assert len(sent) < 4000


def test_a_finished_store_can_be_read_only(pristine: Path, books: Path, tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / pristine.name
    shutil.copytree(pristine, folder)
    (folder / ".lock").unlink()
    prepare_store(scanned(books), tokenizer, tmp_path)
    assert not (folder / ".lock").exists()
