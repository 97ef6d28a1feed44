"""Tasks: what each needs and is judged by, and how a row of one becomes an example for any family."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from pipeline.data.config import TaskConfig, TaskName
from pipeline.data.objectives import IGNORED, Example
from pipeline.data.shard import Integers
from pipeline.files import fingerprint
from pipeline.model.config import Architecture, Family
from pipeline.tokenizer import Tokenizer

Kind = Literal["classification", "text", "retrieval"]


@dataclass(frozen=True)
class Task:
    """What a task needs and how it is judged."""

    kind: Kind
    families: tuple[Family, ...]
    columns: dict[str, str]
    """The columns it reads unless the settings name others."""
    metric: str
    """What the best checkpoint is chosen by; higher is better."""
    generated: bool = False
    """Whether its rows are made up rather than read."""


ALL: tuple[Family, ...] = ("encoder", "decoder", "encoder-decoder", "recurrent")
WRITERS: tuple[Family, ...] = ("decoder", "encoder-decoder", "recurrent")
TRANSFORMERS: tuple[Family, ...] = ("encoder", "decoder", "encoder-decoder")
TASKS: dict[TaskName, Task] = {
    "sentiment": Task("classification", ALL, {"source": "text", "label": "label"}, "accuracy"),
    "classification": Task("classification", ALL, {"source": "text", "label": "label"}, "accuracy"),
    "summarization": Task("text", WRITERS, {"source": "document", "target": "summary", "references": "refs"}, "rougeL"),
    "translation": Task("text", WRITERS, {"source": "en", "target": "de"}, "bleu"),
    "text": Task("text", WRITERS, {"source": "source", "target": "target", "references": "refs"}, "exact_match"),
    "retrieval": Task("retrieval", TRANSFORMERS, {"source": "text"}, "ndcg@10"),
    "reversal": Task("text", WRITERS, {"source": "source", "target": "target"}, "exact_match", generated=True),
    "case": Task("text", WRITERS, {"source": "source", "target": "target"}, "exact_match", generated=True),
}


@dataclass(frozen=True, eq=False)
class Documents:
    """Texts to find, by id; the greatest id first, in which order trec_eval ranks what scores the same."""

    texts: dict[str, str] = field(repr=False)
    fingerprint: str

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> "Documents":
        return cls({name: texts[name] for name in sorted(texts, reverse=True)}, fingerprint(texts))

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The place of each id."""
        return {name: number for number, name in enumerate(self.texts)}


@dataclass(frozen=True)
class Row:
    """One thing to do, and how it should come out."""

    source: str
    target: str | None = None
    """The text to write, or the id of a document that answers a query."""
    label: str | None = None
    references: tuple[str, ...] = ()
    """All good answers, where there are several."""
    judged: tuple[tuple[str, int], ...] = ()
    """How well documents answer a query: their ids, each with a grade; 0 is not at all."""
    documents: Documents | None = None
    """What a query looks for its answer in."""

    @property
    def answers(self) -> tuple[str, ...]:
        return self.references or ((self.target,) if self.target is not None else ())


@dataclass
class Encoder:
    """Turns rows into examples of one family, and counts what had to be cut."""

    task: TaskConfig
    model: Architecture
    tokenizer: Tokenizer
    labels: list[str]
    source_length: int
    target_length: int
    cut: Counter[str] = field(default_factory=Counter)

    def example(self, row: Row) -> Example:
        """What a model reads and is to predict."""
        kind = TASKS[self.task.name].kind
        if kind != "text":
            return self.classified(row) if kind == "classification" else self.paired(row)
        target = self.limited(self.ids(row.target or ""), self.target_length - 1, "target")
        ids = self.limited(self.ids(row.source), self.source_length, "source")
        source, inputs = self.asked(ids)
        end = self.tokenizer.id("end")
        inputs = [*inputs, *target]
        raw = len(ids) + len(target)
        targets = [IGNORED] * (len(inputs) - len(target) - 1) + [*target, end]
        both_ways = self.model.family == "decoder" and self.model.prefix_attention == "bidirectional"
        prefix = len(inputs) - len(target) if both_ways else 0
        return Example(source=whole(source), inputs=whole(inputs), targets=np.array(targets), prefix=prefix, tokens=raw)

    def question(self, row: Row) -> tuple[list[int] | None, list[int]]:
        """What the encoder reads, if there is one, and what the decoder goes on from."""
        return self.asked(self.limited(self.ids(row.source), self.source_length, "source"))

    def asked(self, ids: list[int]) -> tuple[list[int] | None, list[int]]:
        first = [self.tokenizer.first]
        if self.task.tag:
            first.append(self.tokenizer.tag(self.task.tag))
        if self.model.family == "decoder":
            return None, [*first, *ids, self.tokenizer.id("separator")]
        return [*ids, self.tokenizer.id("end")], first

    def classified(self, row: Row) -> Example:
        """A text and its class; where a decoder stands on an encoder, it looks from its begin token."""
        example = replace(self.read(row.source), label=IGNORED if row.label is None else self.number(row.label))
        if self.model.family in ("encoder", "decoder"):
            return example
        return replace(example, inputs=whole([self.tokenizer.first]), targets=np.full(1, IGNORED))

    def paired(self, row: Row) -> Example:
        """A query and a document that answers it."""
        assert row.documents is not None
        numbers, name = row.documents.numbers, row.target or row.judged[0][0]
        return replace(
            self.read(row.source, "query"),
            label=numbers[name] if row.target else IGNORED,
            document=replace(self.read(row.documents.texts[name], "document"), label=numbers[name]),
            relevant=frozenset(numbers[name] for name, grade in row.judged if grade > 0),
        )

    def read(self, text: str, role: str = "source") -> Example:
        """A text as an encoder reads it, or a decoder with an end token after it."""
        ids = self.limited(self.ids(text), self.source_length, role)
        if self.model.family == "decoder":
            shape = [self.tokenizer.first, *ids, self.tokenizer.id("end")]
        elif self.model.family == "encoder":
            shape = [self.tokenizer.id("class"), *ids]
        else:
            shape = [*ids, self.tokenizer.id("end")]
        source, inputs = (None, shape) if self.model.family == "decoder" else (shape, None)
        targets = np.full(len(shape), IGNORED)
        return Example(source=whole(source), inputs=whole(inputs), targets=targets, tokens=len(ids))

    def ids(self, text: str) -> list[int]:
        """The ids of a text; a mark such as <U> before it is one token."""
        for mark in ("<U>", "<L>") if self.task.name == "case" else ():
            if text.startswith(mark):
                return [self.tokenizer.tag(mark), *self.tokenizer.encode(text.removeprefix(mark))]
        return self.tokenizer.encode(text)

    def number(self, label: str) -> int:
        return self.labels.index(label)

    def limited(self, ids: list[int], length: int, role: str) -> list[int]:
        self.cut[role] += len(ids) > length
        return ids[:length]


def whole(ids: Sequence[int] | None) -> Integers | None:
    return None if ids is None else np.array(ids, np.int64)
