"""The tables that show people what is in a corpus, a tokenizer and a store."""

from collections import Counter

from pipeline.data.corpus import SPLITS, Corpus, Entry
from pipeline.data.store import Store
from pipeline.terminal import note, print_table
from pipeline.tokenizer import Measure, Tokenizer

ROWS_SHOWN = 50
DOCUMENT = ("document", "split", "words", "bytes", "language", "cleaned", "dropped because")


def print_corpus(corpus: Corpus) -> None:
    """Print every document and its fate, then the splits."""
    shown = corpus.entries[:ROWS_SHOWN]
    print_table("Documents", DOCUMENT, [document_row(entry) for entry in shown])
    if len(corpus.entries) > ROWS_SHOWN:
        note(f"… and {len(corpus.entries) - ROWS_SHOWN:,} more documents")
        if dropped := [document_row(entry) for entry in corpus.entries[ROWS_SHOWN:] if entry.dropped]:
            print_table("Dropped among them", DOCUMENT, dropped[:ROWS_SHOWN])
    print_splits(corpus)


def print_splits(corpus: Corpus) -> None:
    """Print how much each split holds and how much of it also stands in training."""
    rows: list[tuple[object, ...]] = []
    for split in SPLITS:
        entries = [entry for entry in corpus.entries if any(part.split == split for part in entry.parts)]
        languages = Counter(entry.language for entry in entries)
        leak = f"{corpus.leaks[split]:.2%}" if split in corpus.leaks else "-"
        common = ", ".join(f"{language} {count}" for language, count in languages.most_common(4))
        rows.append((split, len(entries), corpus.bytes(split), common or "-", leak))
    dropped = [entry for entry in corpus.entries if entry.dropped]
    rows.append(("dropped", len(dropped), sum(entry.bytes for entry in dropped), "-", "-"))
    print_table("Splits", ("split", "documents", "bytes", "languages", "8-word sequences also in train"), rows)


def print_tokenizers(title: str, measured: list[tuple[str, Tokenizer, Measure]]) -> None:
    """Print what tokenizers make of a text."""
    columns: dict[str, list[object]] = {
        "tokenizer": [name for name, _, _ in measured],
        "kind": [tokenizer.kind for _, tokenizer, _ in measured],
        "vocabulary": [tokenizer.vocab_size for _, tokenizer, _ in measured],
        "tokens": [found.tokens for _, _, found in measured],
        "bytes per token": [found.bytes_per_token for _, _, found in measured],
        "tokens per word": [found.fertility for _, _, found in measured],
        "unknown": [f"{found.unknown_share:.3%}" for _, _, found in measured],
        "fingerprint": [tokenizer.fingerprint[:12] for _, tokenizer, _ in measured],
    }
    print_table(title, list(columns), list(zip(*columns.values(), strict=True)))


def print_store(store: Store) -> None:
    """Print what a store holds."""
    rows = []
    for split, stream in store.streams.items():
        size = sum(shard.file_bytes for shard in stream.shards)
        documents = sum(shard.documents for shard in stream.shards)
        text = sum(shard.text_bytes() for shard in stream.shards)
        rows.append((split, documents, len(stream), text / len(stream), len(stream.shards), size / len(stream)))
    header = ("split", "documents", "tokens", "text bytes per token", "shards", "disk bytes per token")
    print_table("Token store", header, rows)


def document_row(entry: Entry) -> tuple[object, ...]:
    split = " + ".join(part.split for part in entry.parts) or "-"
    return (entry.name, split, entry.words, entry.bytes, entry.language, cleaning_words(entry) or "-", entry.dropped)


def cleaning_words(entry: Entry) -> str:
    """What was done to a document, in a few words."""
    notes = entry.notes
    counts = {
        "undecodable byte": notes.replaced,
        "control character": notes.controls,
        "line of notices": notes.notice_lines,
        "joined line": notes.joined_lines,
        "surplus blank line": notes.blank_lines,
        "repeated passage": len(entry.cut),
    }
    encoding = [f"from {notes.encoding}"] if notes.encoding != "utf-8" else []
    return ", ".join([*encoding, *(counted(number, thing) for thing, number in counts.items() if number)])


def counted(number: int, thing: str) -> str:
    """A number and a thing, in the plural where there are several."""
    head, _, rest = thing.partition(" of ")
    return f"{number:,} {head}{'s' * (number != 1)}" + (f" of {rest}" if rest else "")
