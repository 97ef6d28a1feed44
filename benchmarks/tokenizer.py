"""How fast a tokenizer learns from novels and encodes them, beside sentencepiece.

    python -m benchmarks.tokenizer --data NOVELS --rounds 5

BPE and unigram of 8,192 tokens, from the same cleaned text to files on disk, in turn; sentencepiece has two threads and
reads every line. Encoding is of all books, a book at a time; bytes a token say how well the vocabularies fit.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import sentencepiece

from benchmarks.harness import arguments_of, save
from pipeline.data.cleaning import Notes
from pipeline.data.config import CorpusConfig, TokenizerConfig
from pipeline.data.sources import sources
from pipeline.terminal import note, print_table
from pipeline.tokenizer import Tokenizer, train

VOCABULARY = 8192
Kind = Literal["bpe", "unigram"]
Encode = Callable[[str], list[int]]


def main() -> None:
    parser = arguments_of("tokenizer", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    texts = [source.read(Notes()) or "" for source in sources(CorpusConfig(corpus=[arguments.data]))]
    size = sum(len(text.encode()) for text in texts)
    with tempfile.TemporaryDirectory() as scratch:
        book = Path(scratch) / "books.txt"
        book.write_text("\n".join(texts))
        kinds: tuple[Kind, ...] = ("bpe", "unigram")
        rows = [row for kind in kinds for row in compare(kind, texts, book, arguments.rounds, size)]
    header = ("kind", "who", "seconds to learn", "ours beside it", "MB/s encoded", "ours beside it", "bytes a token")
    print_table(f"{size / 1e6:.1f} MB, sentencepiece {sentencepiece.__version__}", header, rows)
    save(arguments.json, {"header": header, "rows": rows})


def compare(kind: Kind, texts: list[str], book: Path, rounds: int, size: int) -> list[tuple[object, ...]]:
    makers = {"ours": partial(ours, texts, kind, book.parent), "sentencepiece": partial(theirs, book, kind)}
    learnt: dict[str, list[float]] = {who: [] for who in makers}
    encoded: dict[str, list[float]] = {who: [] for who in makers}
    tokens: dict[str, int] = {}
    for turn in range(rounds):
        for who, make in makers.items():
            began = time.perf_counter()
            encode = make()
            learnt[who].append(time.perf_counter() - began)
            began = time.perf_counter()
            tokens[who] = sum(len(encode(text)) for text in texts)
            encoded[who].append(time.perf_counter() - began)
            note(
                f"{kind}, round {turn + 1}, {who}: {learnt[who][-1]:.1f} s to learn, {encoded[who][-1]:.1f} s to encode"
            )
    return [
        (
            kind, who, statistics.median(learnt[who]), ratio(learnt, who),
            size / 1e6 / statistics.median(encoded[who]), ratio(encoded, who), size / tokens[who],
        )
        for who in makers
    ]  # fmt: skip


def ratio(seconds: dict[str, list[float]], who: str) -> float:
    """How many times as fast as it ours is."""
    return statistics.median(other / own for own, other in zip(seconds["ours"], seconds[who], strict=True))


def ours(texts: list[str], kind: Kind, scratch: Path) -> Encode:
    folder = Path(tempfile.mkdtemp(dir=scratch)) / "tokenizer"
    train(iter(texts), TokenizerConfig(kind=kind, vocab_size=VOCABULARY)).save(folder)
    return Tokenizer.load(folder).encode


def theirs(book: Path, kind: Kind) -> Encode:
    prefix = tempfile.mkdtemp(dir=book.parent) + "/model"
    sentencepiece.SentencePieceTrainer.train(
        input=str(book), model_prefix=prefix, vocab_size=VOCABULARY, model_type=kind, num_threads=2,
        input_sentence_size=0, max_sentence_length=1_000_000, byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    encode: Encode = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model").encode
    return encode


if __name__ == "__main__":
    main()
