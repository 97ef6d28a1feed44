"""A token store: a corpus tokenised once, in parallel, into memory-mapped shards that can never be stale."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.config import Split
from pipeline.data.corpus import SPLITS, Corpus, Entry, read_part
from pipeline.data.parallel import parallel_map
from pipeline.data.shard import MEND, VERSION, Shard, Stream, id_type, read_shard, write_shard
from pipeline.data.sources import Source
from pipeline.errors import UserError
from pipeline.files import described, fingerprint, locked, read_sealed, write_sealed
from pipeline.terminal import note, progress, warn
from pipeline.tokenizer import Tokenizer

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Store:
    """A tokenised corpus on disk: a stream of ids for each split."""

    path: Path
    corpus: str
    """The fingerprint of the text."""
    tokenizer: str
    """The fingerprint of the tokenizer."""
    streams: dict[Split, Stream]

    @classmethod
    def open(cls, path: Path, tokenizer: str | None = None) -> "Store":
        """Open a finished store; pass a tokenizer's fingerprint to be sure that the ids are that tokenizer's."""
        manifest = read_manifest(path / MANIFEST)
        with described(path / MANIFEST, MEND):
            made_with = manifest["tokenizer"]
            if tokenizer is not None and tokenizer != made_with:
                raise UserError(
                    f"{path}: made with tokenizer {made_with[:16]}, not {tokenizer[:16]}; "
                    "use that tokenizer, or prepare a store with this one"
                )
            streams: dict[Split, Stream] = {
                split: Stream([listed_shard(path, made_with, record) for record in content["shards"]])
                for split, content in manifest["splits"].items()
            }
            return cls(path, manifest["corpus"], made_with, streams)

    def stream(self, split: Split) -> Stream:
        """The tokens of a split, which must have some."""
        if split not in self.streams:
            keys = f"data.{split}_fraction or data.{split}_books"
            raise UserError(f"{self.path}: no {split} text in this store; hold out more by {keys}")
        return self.streams[split]


def prepare_store(corpus: Corpus, tokenizer_folder: Path, output: Path) -> Store:
    """Tokenise a corpus into a store below `output`, go on with one that was interrupted, or open the finished one."""
    tokenizer = Tokenizer.load(tokenizer_folder)
    identity = {"format": VERSION, "corpus": corpus.fingerprint, "tokenizer": tokenizer.fingerprint}
    folder = output / fingerprint(identity)[:16]
    if store := intact_store(folder):
        return store
    with locked(folder / ".lock"):  # another process may have made it while we waited
        return intact_store(folder) or make_store(folder, corpus, tokenizer, tokenizer_folder)


def intact_store(folder: Path) -> Store | None:
    """The store in a folder if it is finished and every bit of it right."""
    with suppress(UserError):
        store = Store.open(folder)
        for stream in store.streams.values():
            stream.verify()
        return store
    return None


# --- The manifest ------------------------------------------------------------------------------------------------


def write_manifest(path: Path, corpus: Corpus, tokenizer: Tokenizer, splits: dict[Split, list[Shard]]) -> None:
    """Write what makes a store complete: what it was made of and every shard in it."""
    manifest: dict[str, Any] = {
        "format": VERSION,
        "corpus": corpus.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "dtype": id_type(tokenizer.vocab_size).name,
        "splits": {split: split_content(shards) for split, shards in splits.items() if shards},
    }
    write_sealed(path, manifest)


def split_content(shards: list[Shard]) -> dict[str, Any]:
    return {
        "tokens": sum(shard.tokens for shard in shards),
        "documents": sum(shard.documents for shard in shards),
        "bytes": sum(shard.text_bytes() for shard in shards),
        "shards": [shard_record(shard) for shard in shards],
    }


def shard_record(shard: Shard) -> dict[str, Any]:
    return {"file": shard.path.name, "tokens": shard.tokens, "documents": shard.documents, "sha256": shard.sha256}


def read_manifest(path: Path) -> dict[str, Any]:
    """Read and check a manifest; a store without one is not finished."""
    if not path.exists():
        raise UserError(f"{path.parent}: no finished token store; run `triptych prepare`")
    manifest = read_sealed(path, MEND)
    if manifest.get("format") != VERSION:
        raise UserError(
            f"{path}: a store of format {manifest.get('format')}, this program reads {VERSION}; prepare it again"
        )
    return manifest


def listed_shard(folder: Path, tokenizer: str, record: dict[str, Any]) -> Shard:
    """Open a shard that a manifest lists and check that it is that shard."""
    shard = read_shard(folder / record["file"])
    if shard.tokenizer != tokenizer or shard_record(shard) != record:
        raise UserError(f"{shard.path}: not the shard that {MANIFEST} lists; {MEND}")
    return shard


# --- Making a store ----------------------------------------------------------------------------------------------

SHARDS = 32  # about as many as we make, so that no worker is idle for long at the end
LEAST_BYTES, MOST_BYTES = 2**20, 2**24  # of text in a shard; the work of a shard is what an interruption can cost
BYTES_PER_TOKEN = 4  # of English text, for an estimate of the space it will take


@dataclass(frozen=True)
class Job:
    """A shard to be made."""

    path: Path
    split: Split
    documents: list[tuple[Source, Entry]]
    tokenizer_folder: Path
    tokenizer: str
    """The fingerprint that the tokenizer must have."""


def make_store(folder: Path, corpus: Corpus, tokenizer: Tokenizer, tokenizer_folder: Path) -> Store:
    """Make the shards that are not there yet, then the manifest."""
    if (folder / MANIFEST).exists():
        warn(f"{folder}: this store is damaged; what is broken is made again")
        (folder / MANIFEST).unlink()
    note(f"preparing the token store {folder}")
    text_bytes = sum(corpus.bytes(split) for split in SPLITS)
    check_space(folder, text_bytes, tokenizer)
    splits: dict[Split, list[Shard]] = {split: [] for split in SPLITS}
    try:
        with progress("tokenising", text_bytes, "bytes") as advance:
            jobs = shard_jobs(folder, corpus, tokenizer_folder, tokenizer.fingerprint)
            for split, shard in parallel_map(make_shard, jobs, corpus.config.workers):
                splits[split].append(shard)
                advance(shard.text_bytes())
    finally:
        for path in folder.glob(".*.tmp"):  # of workers that were stopped, now or in an earlier run
            path.unlink()
    write_manifest(folder / MANIFEST, corpus, tokenizer, splits)
    return Store.open(folder)


def check_space(folder: Path, text_bytes: int, tokenizer: Tokenizer) -> None:
    made = sum(path.stat().st_size for path in folder.glob("*.bin"))
    needed = text_bytes // BYTES_PER_TOKEN * id_type(tokenizer.vocab_size).itemsize - made
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder}: not enough disk: the store needs about {needed / 1e9:,.2f} GB, {free / 1e9:,.2f} GB are free; "
            "make room or choose another --output"
        )


def shard_jobs(folder: Path, corpus: Corpus, tokenizer_folder: Path, tokenizer: str) -> Iterator[Job]:
    """Name a shard for each group of documents; row texts are in memory only while their group is filled."""
    numbers = {split: count() for split in SPLITS}
    for split, documents in document_groups(corpus):
        path = folder / f"{split}-{next(numbers[split]):05}.bin"
        yield Job(path, split, documents, tokenizer_folder, tokenizer)


def document_groups(corpus: Corpus) -> Iterator[tuple[Split, list[tuple[Source, Entry]]]]:
    """Consecutive documents of a split, as many as make a shard; the same whatever the number of workers."""
    total = sum(corpus.bytes(split) for split in SPLITS)
    enough = min(max(total // SHARDS, LEAST_BYTES), MOST_BYTES)
    groups: dict[Split, list[tuple[Source, Entry]]] = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    for source, entry in corpus.pairs():
        for part in entry.parts:
            groups[part.split].append((source, entry))
            sizes[part.split] += part.bytes
            if sizes[part.split] >= enough:
                yield part.split, groups[part.split]
                groups[part.split], sizes[part.split] = [], 0
    yield from ((split, documents) for split, documents in groups.items() if documents)


def make_shard(job: Job) -> tuple[Split, Shard]:
    """Tokenise the documents of a shard, unless that was done before."""
    if shard := made_before(job):
        return job.split, shard
    tokenizer = loaded_tokenizer(job.tokenizer_folder, job.tokenizer)
    texts = ((entry.name, read_part(source, entry, job.split)) for source, entry in job.documents)
    id_bytes = id_type(tokenizer.vocab_size).itemsize
    return job.split, write_shard(job.path, id_bytes, job.tokenizer, texts, partial(document_ids, tokenizer))


def made_before(job: Job) -> Shard | None:
    """The shard of a job if an earlier run made it and every bit of it is right."""
    with suppress(UserError):
        shard = read_shard(job.path)
        shard.verify()
        names = [entry.name for _, entry in job.documents]
        if shard.tokenizer == job.tokenizer and shard.document_names() == names:
            return shard
    return None


# --- Text to ids -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def loaded_tokenizer(folder: Path, expected: str) -> Tokenizer:
    """The tokenizer of this process, with the words it remembers."""
    tokenizer = Tokenizer.load(folder)
    if tokenizer.fingerprint != expected:
        raise UserError(f"{folder}: the tokenizer changed while the store was being made; run again")
    return tokenizer


def document_ids(tokenizer: Tokenizer, text: str) -> Iterator[bytes]:
    """Yield the ids of a document and its end token as they stand in a shard, a little at a time."""
    for piece in tokenizer.pieces(text):
        yield stored(tokenizer.encode(piece), tokenizer.vocab_size)
    yield stored([tokenizer.id("end")], tokenizer.vocab_size)


def stored(ids: list[int], vocab_size: int) -> bytes:
    assert max(ids, default=0) < vocab_size, "an id beyond the vocabulary"
    return np.array(ids, id_type(vocab_size)).tobytes()
