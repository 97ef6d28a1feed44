"""A corpus: documents found, cleaned, compared and split by book, in one pass that keeps no text in memory."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch

from pipeline.data import duplicates
from pipeline.data.cleaning import Notes
from pipeline.data.config import CorpusConfig, Split
from pipeline.data.languages import guess_language
from pipeline.data.parallel import parallel_map
from pipeline.data.sources import Source, sources
from pipeline.errors import UserError
from pipeline.terminal import note, progress, warn

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
TAIL_SHARE = 0.05
LEAST_DIVIDED = 40  # words; the end of a shorter document would be a word or nothing
BATCH_BYTES = 2**20
UNTOUCHED = Notes()


@dataclass(frozen=True, slots=True)
class Part:
    """The text of a document that belongs to one split."""

    split: Split
    bytes: int
    """UTF-8 bytes; about right where a document is divided."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What the first pass found out about a document."""

    name: str
    text_hash: str
    bytes: int
    words: int
    language: str
    notes: Notes
    dropped: str = ""
    """Why the document is not used; empty when it is."""
    like: int | None = None
    """The number of the first document that shares much of this one's text."""
    cut: tuple[int, ...] = ()
    """Lines left out because they have stood before."""
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Corpus:
    """The documents of a corpus, where each goes, and how to read them again."""

    config: CorpusConfig
    entries: list[Entry]
    leaks: dict[Split, float] = field(default_factory=dict)
    """The share of each held-out split's eight-word sequences that also stand in training."""

    @property
    def fingerprint(self) -> str:
        """The identity of everything that will be read: texts, what is left out, and the split of each."""
        digest = hashlib.sha256()
        for entry in self.entries:
            if entry.parts:
                splits = "+".join(f"{part.split}:{part.bytes}" for part in entry.parts)
                digest.update(f"{entry.text_hash} {splits} {entry.cut}\n".encode())
        return digest.hexdigest()

    def bytes(self, split: Split) -> int:
        """About how many bytes of text a split has."""
        return sum(part.bytes for entry in self.entries for part in entry.parts if part.split == split)

    def pairs(self) -> Iterator[tuple[Source, Entry]]:
        """Every document that is used, unread, with its entry; rows of tables are read from their file again."""
        found = sources(self.config)
        for entry in self.entries:
            source = next(found, None)
            if source is None or source.name != entry.name:
                raise UserError(f"{entry.name}: the corpus changed while it was being read; run again")
            if entry.parts:
                yield source, entry

    def texts(self, split: Split) -> Iterator[str]:
        """The text of a split, document by document, read in parallel and in order."""
        jobs = ((source, entry, split) for source, entry in self.pairs() for part in entry.parts if part.split == split)
        return parallel_map(read_job, jobs, self.config.workers)


def scan(config: CorpusConfig) -> Corpus:
    """Read every document once and decide what is used, and for what."""
    findings = examine_all(config)
    entries = [finding.entry for finding in findings]
    if config.deduplicate:
        entries = without_copies(entries)
    entries = related(entries, findings, config.deduplicate)
    if config.deduplicate:
        entries = without_repeated_passages(entries, findings)
    entries = assigned(entries, config)
    if not any(entry.parts for entry in entries):
        raise UserError(nothing_left(entries))
    return Corpus(config, entries, leaks(entries, findings))


def read_part(source: Source, entry: Entry, split: Split) -> str:
    """Read a document again and return its text for one split, checked against what the first pass saw."""
    text = source.read(Notes()) or ""
    if text_hash(text) != entry.text_hash:
        raise UserError(f"{source.location}: the text changed while it was being read; run again")
    if entry.cut:
        left_out = set(entry.cut)
        text = "\n".join(line for number, line in enumerate(text.split("\n")) if number not in left_out)
    if len(entry.parts) == 1:
        return text
    boundary = tail_boundary(text)
    return text[:boundary] if split == "train" else text[boundary:]


def read_job(job: tuple[Source, Entry, Split]) -> str:
    return read_part(*job)


# --- The first pass ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """What one look at a document leaves behind: its entry and what it takes to compare it with others."""

    entry: Entry
    sample: duplicates.Hashes
    passages: duplicates.Passages


def examine_all(config: CorpusConfig) -> list[Finding]:
    findings: list[Finding] = []
    with progress("reading documents", None) as advance:
        for batch in parallel_map(examine_batch, batches(sources(config)), config.workers):
            findings += batch
            advance(len(batch))
    for entry in (finding.entry for finding in findings if not finding.entry.dropped):
        if entry.notes.encoding != "utf-8":
            warn(f"{entry.name}: not UTF-8, read as {entry.notes.encoding}")
        if entry.notes.replaced:
            warn(f"{entry.name}: {entry.notes.replaced} bytes that are no {entry.notes.encoding}, shown as U+FFFD")
    return findings


def batches(found: Iterator[Source]) -> Iterator[list[Source]]:
    """Files one by one, rows in handfuls, so that sending them costs little beside reading them."""
    batch: list[Source] = []
    size = 0
    for source in found:
        batch.append(source)
        size += BATCH_BYTES if source.row is None else len(source.row) + 64
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def examine_batch(batch: list[Source]) -> list[Finding]:
    return [examine(source) for source in batch]


def examine(source: Source) -> Finding:
    """Read a document and describe it."""
    notes = Notes()
    text = source.read(notes)
    dropped = "not text (binary data)" if text is None else "" if text.strip() else "empty"
    text = text or ""
    words = sum(len(block.split()) for block in duplicates.blocks(text))
    size = len(text.encode())
    notes = UNTOUCHED if notes == UNTOUCHED else notes  # millions of rows share one
    entry = Entry(source.name, text_hash(text), size, words, guess_language(text), notes, dropped)
    return Finding(entry, duplicates.sample(text), duplicates.passages(text))


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# --- What is used ------------------------------------------------------------------------------------------------


def without_copies(entries: list[Entry]) -> list[Entry]:
    """Exact copies are used once, the first of them."""
    first: dict[str, int] = {}
    result = list(entries)
    for number, entry in enumerate(entries):
        original = first.setdefault(entry.text_hash, number)
        if original != number and not entry.dropped:
            result[number] = replace(entry, dropped=f"a copy of {entries[original].name}", like=original)
    return result


def related(entries: list[Entry], findings: list[Finding], deduplicate: bool) -> list[Entry]:
    """Documents that share much of their text belong together; of several editions of a book the first is used."""
    first = [number if entry.like is None else entry.like for number, entry in enumerate(entries)]

    def root(number: int) -> int:
        while first[number] != number:
            number = first[number]
        return number

    used = [number for number, entry in enumerate(entries) if not entry.dropped]
    result = list(entries)
    for overlap in duplicates.overlaps([findings[number].sample for number in used]):
        one, other = used[overlap.first], used[overlap.second]
        low, high = sorted((root(one), root(other)))
        first[high] = low
        if overlap.same and deduplicate and not result[one].dropped and not result[other].dropped:
            result[other] = replace(result[other], dropped=f"{overlap.share:.0%} the same as {entries[one].name}")
    return [entry if root(n) == n else replace(entry, like=root(n)) for n, entry in enumerate(result)]


def without_repeated_passages(entries: list[Entry], findings: list[Finding]) -> list[Entry]:
    """Long paragraphs that have stood before are left out."""
    used = [number for number, entry in enumerate(entries) if not entry.dropped]
    result = list(entries)
    for number, (lines, size) in zip(used, duplicates.repeated([findings[n].passages for n in used]), strict=True):
        if lines:
            left = entries[number].bytes - size
            dropped = "" if left > 1 else "all of it has stood before"
            result[number] = replace(entries[number], cut=lines, bytes=left, dropped=dropped)
    return result


def nothing_left(entries: list[Entry]) -> str:
    if not entries:
        return "corpus: no documents found"
    more = f" (and {len(entries) - 1} more)" if len(entries) > 1 else ""
    return f"corpus: no text to use: {entries[0].name}: {entries[0].dropped}{more}"


# --- Where it goes -----------------------------------------------------------------------------------------------


def assigned(entries: list[Entry], config: CorpusConfig) -> list[Entry]:
    """Give every used document its split: by name where the config says so, else by the hash of its text."""
    first = [number if entry.like is None else entry.like for number, entry in enumerate(entries)]
    used = [number for number, entry in enumerate(entries) if not entry.dropped]
    named = named_splits(entries, config)
    by_group: dict[int, Split] = {}
    for number, split in named.items():
        if by_group.setdefault(first[number], split) != split:
            raise UserError(f"{split}_books: {entries[number].name} shares text with a book of another split; move one")
    hashed = [hashed_split(entry, config) for entry in entries]
    if not any(by_group.get(first[number], hashed[first[number]]) == "train" for number in used):
        hashed = ["train"] * len(entries)  # few documents, all drawn for something else
        if used and all(first[number] in by_group for number in used):
            raise UserError("validation_books and test_books take every document; leave some to train on")
    splits = [by_group.get(number, hashed[number]) for number in first]
    for number in used:
        if number not in named and splits[number] != hashed[number]:
            other = "a book named for it" if first[number] in by_group else entries[first[number]].name
            note(f"{entries[number].name}: goes to {splits[number]}, not {hashed[number]}; it shares text with {other}")
    sizes = Counter(first[number] for number in used)
    long = {number for number in used if entries[number].words >= LEAST_DIVIDED}
    alone = {number for number in long if sizes[first[number]] == 1} or long  # the end stands in no other document
    held_out = any(splits[number] == "validation" for number in used)
    divided = {number for number in alone if splits[number] == "train" and not held_out}
    if divided:
        warn(f"no document fell to validation: the last {TAIL_SHARE:.0%} of training documents is used for it")
    result = list(entries)
    for number in used:
        result[number] = replace(entries[number], parts=parts_of(entries[number], splits[number], number in divided))
    return result


def parts_of(entry: Entry, split: Split, divided: bool) -> tuple[Part, ...]:
    if not divided:
        return (Part(split, entry.bytes),)
    tail = int(entry.bytes * TAIL_SHARE)
    return (Part("train", entry.bytes - tail), Part("validation", tail))


def tail_boundary(text: str) -> int:
    """Where the last part of a document begins: after the next line, the next word, or the word before."""
    start = int(len(text) * (1 - TAIL_SHARE))
    for separator in ("\n", " "):
        if (end := text.find(separator, start, len(text) - 1)) >= 0:
            return end + 1
    return max(text.rfind(separator, 0, start) for separator in ("\n", " ")) + 1


def hashed_split(entry: Entry, config: CorpusConfig) -> Split:
    """The split that a text's hash draws, the same whatever else the corpus holds; none where books are named."""
    draw = int(entry.text_hash[:16], 16) / 2**64
    if draw < config.validation_fraction:
        return "train" if config.validation_books else "validation"
    if draw < config.validation_fraction + config.test_fraction:
        return "train" if config.test_books else "test"
    return "train"


def named_splits(entries: list[Entry], config: CorpusConfig) -> dict[int, Split]:
    """The splits that the config gives by name, by the number of the document."""
    result: dict[int, Split] = {}
    named: list[tuple[Split, list[str]]] = [("validation", config.validation_books), ("test", config.test_books)]
    for split, patterns in named:
        for pattern in patterns:
            found = [number for number, entry in enumerate(entries) if matches(entry.name, pattern)]
            if not found:
                raise UserError(f"{split}_books: no document matches {pattern!r}; `triptych corpus inspect` lists them")
            for number in found:
                result[number] = split
    return result


def matches(name: str, pattern: str) -> bool:
    """Whether a glob fits a document's whole name or its last part, with or without the ending."""
    last = name.rsplit("/", 1)[-1]
    forms = [form.lower() for form in (name, last, last.removesuffix(".txt"))]
    return pattern.lower() in forms or any(fnmatch(form, pattern.lower()) for form in forms)  # it may hold brackets


def leaks(entries: list[Entry], findings: list[Finding]) -> dict[Split, float]:
    """How much of each held-out split also stands in training, before repeated passages are left out."""
    samples: dict[Split, list[duplicates.Hashes]] = {split: [] for split in SPLITS}
    for entry, finding in zip(entries, findings, strict=True):
        if len(entry.parts) == 1:
            samples[entry.parts[0].split].append(finding.sample)
    held_out: tuple[Split, ...] = ("validation", "test")
    found = {split: duplicates.leak(samples[split], samples["train"]) for split in held_out}
    return {split: share for split, share in found.items() if share is not None}
