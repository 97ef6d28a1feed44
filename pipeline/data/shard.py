"""A shard: one file of token ids behind a checked header, with an index of the documents they belong to."""

import hashlib
import json
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from pipeline.errors import UserError
from pipeline.files import replacing

Ids = npt.NDArray[np.unsignedinteger]
Integers = npt.NDArray[np.int64]
Encode = Callable[[str], Iterable[bytes]]  # a text to its ids as they stand in a file, piece by piece

MAGIC = b"TRIPTYCH"
VERSION = 1
HEADER = struct.Struct("<8sIIQQQ32s32s")  # magic, version, bytes an id, ids, documents, bytes of names, two hashes
MEND = "run `triptych prepare` again to mend it"


def id_type(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The smaller of two types that holds every id of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


@dataclass(frozen=True)
class Shard:
    """A file of ids and what its header says: header, ids, two integers a document, the documents' names as JSON."""

    path: Path
    id_bytes: int
    tokens: int
    documents: int
    names_bytes: int
    tokenizer: str
    """The fingerprint of the tokenizer that made the ids."""
    sha256: str
    """The hash of everything behind the header."""

    @property
    def index_start(self) -> int:
        return HEADER.size + self.tokens * self.id_bytes

    @property
    def names_start(self) -> int:
        return self.index_start + self.documents * 16

    @property
    def file_bytes(self) -> int:
        return self.names_start + self.names_bytes

    def verify(self) -> None:
        """Fail unless the content is what was written, to the last bit."""
        with self.path.open("rb") as opened:
            opened.seek(HEADER.size)
            if hashlib.file_digest(opened, "sha256").hexdigest() != self.sha256:
                raise UserError(f"{self.path}: damaged, its checksum differs; {MEND}")

    def ids(self) -> Ids:
        """The ids, memory-mapped."""
        return np.memmap(self.path, f"<u{self.id_bytes}", mode="r", offset=HEADER.size, shape=(self.tokens,))

    def document_sizes(self) -> Integers:
        """A row for each document: its ids, the end token included, and the bytes of its text."""
        with self.path.open("rb") as opened:
            opened.seek(self.index_start)
            sizes = np.fromfile(opened, "<i8", self.documents * 2).reshape(-1, 2)
        if sizes[:, 0].sum() != self.tokens:
            raise UserError(f"{self.path}: damaged, its index does not add up; {MEND}")
        return sizes

    def text_bytes(self) -> int:
        """The text of all its documents in UTF-8."""
        return int(self.document_sizes()[:, 1].sum())

    def document_names(self) -> list[str]:
        with self.path.open("rb") as opened:
            opened.seek(self.names_start)
            names: list[str] = json.loads(opened.read(self.names_bytes))
        return names


class Stream:
    """The shards of a split read as one long row of ids, document after document.

    The checksum of a shard is verified when its ids are first read, so that nothing damaged is ever used.
    """

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self.ends = list(accumulate(shard.tokens for shard in shards))
        self.mapped: dict[int, Ids] = {}

    def __reduce__(self) -> tuple[type["Stream"], tuple[list[Shard]]]:
        return Stream, (self.shards,)  # another process maps the files itself

    def __len__(self) -> int:
        return self.ends[-1]

    def read(self, start: int, stop: int) -> Ids:
        """The ids from `start` up to `stop`, wherever the shards begin and end."""
        if not 0 <= start < stop <= len(self):
            raise IndexError(f"tokens {start:,} to {stop:,} of {len(self):,}")
        pieces = []
        for number in range(bisect_right(self.ends, start), bisect_right(self.ends, stop - 1) + 1):
            shard_start = self.ends[number] - self.shards[number].tokens
            pieces.append(self.shard_ids(number)[max(start - shard_start, 0) : stop - shard_start])
        return np.concatenate(pieces)

    def shard_ids(self, number: int) -> Ids:
        if number not in self.mapped:
            self.shards[number].verify()
            self.mapped[number] = self.shards[number].ids()
        return self.mapped[number]

    def verify(self) -> None:
        """Fail unless every shard is what was written, to the last bit."""
        for number in range(len(self.shards)):
            self.shard_ids(number)

    def document_bounds(self) -> Integers:
        """Where documents begin and end: document `d` is the tokens from bound `d` up to bound `d + 1`."""
        sizes = np.concatenate([shard.document_sizes()[:, 0] for shard in self.shards])
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def write_shard(
    path: Path, id_bytes: int, tokenizer: str, documents: Iterable[tuple[str, str]], encode: Encode
) -> Shard:
    """Write named texts to a shard as they come; the file appears when it is whole."""
    sizes: list[tuple[int, int]] = []
    names: list[str] = []
    with replacing(path) as temporary, temporary.open("wb+") as opened:
        opened.write(bytes(HEADER.size))
        for name, text in documents:
            written = sum(opened.write(ids) for ids in encode(text))
            sizes.append((written // id_bytes, len(text.encode())))
            names.append(name)
        opened.write(np.array(sizes, "<i8").tobytes())
        names_bytes = opened.write(json.dumps(names, ensure_ascii=False).encode())
        opened.seek(HEADER.size)
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        tokens = sum(count for count, _ in sizes)
        shard = Shard(path, id_bytes, tokens, len(sizes), names_bytes, tokenizer, digest)
        write_header(opened, shard)
    return shard


def write_header(opened: BinaryIO, shard: Shard) -> None:
    counts = shard.id_bytes, shard.tokens, shard.documents, shard.names_bytes
    hashes = bytes.fromhex(shard.tokenizer), bytes.fromhex(shard.sha256)
    opened.seek(0)
    opened.write(HEADER.pack(MAGIC, VERSION, *counts, *hashes))


def read_shard(path: Path) -> Shard:
    """Read a shard's header and check it against the size of the file."""
    try:
        with path.open("rb") as opened:
            header = opened.read(HEADER.size)
    except FileNotFoundError as error:
        raise UserError(f"{path}: missing; {MEND}") from error
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise UserError(f"{path}: not a token shard, or its header is damaged; {MEND}")
    _, version, id_bytes, tokens, documents, names_bytes, tokenizer, sha256 = HEADER.unpack(header)
    if version != VERSION:
        raise UserError(f"{path}: a shard of format {version}, this program reads {VERSION}; prepare a new store")
    if id_bytes not in (2, 4):
        raise UserError(f"{path}: ids of {id_bytes} bytes, expected 2 or 4; {MEND}")
    shard = Shard(path, id_bytes, tokens, documents, names_bytes, tokenizer.hex(), sha256.hex())
    if (size := path.stat().st_size) != shard.file_bytes:
        raise UserError(f"{path}: {size:,} bytes long, its header says {shard.file_bytes:,}; {MEND}")
    return shard
