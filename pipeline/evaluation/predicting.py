"""Predictions of a fine-tuned model: the same for a row whatever stands beside it in a batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from pipeline.bundle import Model
from pipeline.config import GenerationConfig
from pipeline.data.batch import Batch, collate
from pipeline.data.objectives import Example
from pipeline.data.tasks import TASKS, Documents, Encoder, Row
from pipeline.evaluation import metrics
from pipeline.evaluation.ranking import Index, Vectors
from pipeline.model.generation import encode, generate, inference
from pipeline.model.heads import Pooling, pooled

Item = TypeVar("Item")


@dataclass(frozen=True)
class Predictor:
    """A model that does a task."""

    model: Model
    encoder: Encoder
    pooling: Pooling
    generation: GenerationConfig
    batch_size: int = 32

    def predict(self, rows: Sequence[Row], index: Index | None = None) -> list[Any]:
        """For each row the probabilities of its classes, the text written, or a ranking of its documents."""
        kind = TASKS[self.encoder.task.name].kind
        if kind == "retrieval":
            if index is None:
                assert rows and rows[0].documents is not None, "nothing to search"
                index = self.index(rows[0].documents)
            return index.search(self.embed([row.source for row in rows]))
        return self.in_batches(rows, lambda row: len(row.source), self.classify if kind != "text" else self.write)

    def in_batches(
        self, items: Sequence[Item], size: Callable[[Item], int], work: Callable[[list[Item]], list[Any]]
    ) -> list[Any]:
        """The results of some work, in the order of the items; those of similar size are done together."""
        order = sorted(range(len(items)), key=lambda number: size(items[number]))
        found: dict[int, Any] = {}
        for start in range(0, len(order), self.batch_size):
            numbers = order[start : start + self.batch_size]
            found |= zip(numbers, work([items[number] for number in numbers]), strict=True)
        return [found[number] for number in range(len(items))]

    def classify(self, rows: list[Row]) -> list[Any]:
        with inference(self.model):
            batch = self.batch([self.encoder.example(Row(row.source)) for row in rows])
            logits_BL = class_logits(self.model, batch, self.pooling)
            return list(logits_BL.float().softmax(-1).cpu().numpy().astype(float))

    def index(self, documents: Documents) -> Index:
        """Documents made ready to be found."""
        return Index(documents, self.embed(list(documents.texts.values())))

    def embed(self, texts: Sequence[str]) -> Vectors:
        """For each text a vector of length 1."""

        def work(some: list[str]) -> list[Any]:
            with inference(self.model):
                batch = self.batch([self.encoder.read(text) for text in some])
                return list(embeddings(self.model, batch, self.pooling).cpu().numpy())

        found = self.in_batches(texts, len, work)
        return np.array(found, np.float32).reshape(len(texts), self.model.architecture.width)

    def batch(self, examples: list[Example]) -> Batch:
        return collate(examples, self.encoder.tokenizer.pad).to(next(self.model.parameters()).device)

    def write(self, rows: list[Row]) -> list[str]:
        questions = [self.encoder.question(row) for row in rows]
        sources = [source for source, _ in questions if source is not None]
        memory = encode(self.model, sources) if sources else None
        prompts = [prompt for _, prompt in questions]
        tokenizer = self.encoder.tokenizer
        written = generate(self.model, prompts, self.generation, end=tokenizer.id("end"), memory=memory, answer=True)
        return [tokenizer.decode(sequences[0].ids).strip() for sequences in written]

    def score(self, rows: Sequence[Row], predictions: Sequence[Any]) -> metrics.Score:
        """How good predictions are, by the metrics of the task."""
        task = self.encoder.task.name
        if TASKS[task].kind == "classification":
            labels = np.array([self.encoder.number(row.label or "") for row in rows])
            return metrics.score_classes(np.array(predictions), labels)
        if TASKS[task].kind == "retrieval":
            found = [[name for name, _ in ranking] for ranking in predictions]
            return metrics.score_rankings(found, [dict(row.judged) for row in rows])
        answers = [row.answers for row in rows]
        if task == "translation":
            return metrics.score_translations(predictions, answers)
        if task == "summarization":
            return metrics.score_summaries(predictions, answers)
        if task == "text":
            exact, near = metrics.score_exact(predictions, answers), metrics.score_translations(predictions, answers)
            return replace(exact, metrics=exact.metrics | near.metrics, signatures=near.signatures)
        strings = [row.source.removeprefix("<U>").removeprefix("<L>") for row in rows]
        return metrics.score_exact(predictions, answers, strings)


def class_logits(model: Model, batch: Batch, pooling: Pooling) -> Tensor:
    """The logits of classes: of an encoder's pooled states, or of the decoder's where there is one."""
    assert model.classifier is not None
    return model.classifier(pooled_states(model, batch, pooling))


def embeddings(model: Model, batch: Batch, pooling: Pooling) -> Tensor:
    """The embedding of each sequence: its pooled states, made a vector of length 1."""
    return F.normalize(pooled_states(model, batch, pooling).float(), dim=-1)


def pooled_states(model: Model, batch: Batch, pooling: Pooling) -> Tensor:
    real_BT = batch.source_real_BS if batch.inputs_BT is None else batch.inputs_real_BT
    return pooled(batch.states(model), real_BT, pooling)
