"""Predictions of a fine-tuned model: the same for a row whatever stands beside it in a batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from pipeline.bundle import Model
from pipeline.config import GenerationConfig
from pipeline.data.batch import Batch, collate
from pipeline.data.tasks import TASKS, Encoder, Row
from pipeline.evaluation.metrics import Score, score_classes, score_exact, score_summaries, score_translations
from pipeline.model.generation import encode, generate, inference
from pipeline.model.heads import Pooling, pooled


@dataclass(frozen=True)
class Predictor:
    """A model that does a task."""

    model: Model
    encoder: Encoder
    pooling: Pooling
    generation: GenerationConfig
    batch_size: int = 32

    def predict(self, rows: Sequence[Row]) -> list[Any]:
        """For each row the probabilities of its classes, or the text written; rows of similar length go together."""
        kind = TASKS[self.encoder.task.name].kind
        order = sorted(range(len(rows)), key=lambda number: len(rows[number].source))
        found: dict[int, Any] = {}
        work: Callable[[list[Row]], list[Any]] = self.classify if kind == "classification" else self.write
        for start in range(0, len(order), self.batch_size):
            numbers = order[start : start + self.batch_size]
            for number, result in zip(numbers, work([rows[number] for number in numbers]), strict=True):
                found[number] = result
        return [found[number] for number in range(len(rows))]

    def classify(self, rows: list[Row]) -> list[Any]:
        pad = self.encoder.tokenizer.find("pad") or 0
        device = next(self.model.parameters()).device
        with inference(self.model):
            batch = collate([self.encoder.example(Row(row.source)) for row in rows], pad=pad).to(device)
            logits_BL = class_logits(self.model, batch, self.pooling)
            return list(logits_BL.float().softmax(-1).cpu().numpy().astype(float))

    def write(self, rows: list[Row]) -> list[str]:
        questions = [self.encoder.question(row) for row in rows]
        sources = [source for source, _ in questions if source is not None]
        memory = encode(self.model, sources) if sources else None
        prompts = [prompt for _, prompt in questions]
        tokenizer = self.encoder.tokenizer
        written = generate(self.model, prompts, self.generation, end=tokenizer.id("end"), memory=memory)
        return [tokenizer.decode(sequences[0].ids).strip() for sequences in written]

    def score(self, rows: Sequence[Row], predictions: Sequence[Any]) -> Score:
        """How good predictions are, by the metrics of the task."""
        task = self.encoder.task.name
        if TASKS[task].kind == "classification":
            labels = np.array([self.encoder.number(row.label or "") for row in rows])
            return score_classes(np.array(predictions), labels)
        answers = [row.answers for row in rows]
        if task == "translation":
            return score_translations(predictions, answers)
        if task == "summarization":
            return score_summaries(predictions, answers)
        return score_exact(predictions, answers, [row.source.removeprefix("<U>").removeprefix("<L>") for row in rows])


def class_logits(model: Model, batch: Batch, pooling: Pooling) -> Tensor:
    """The logits of classes: of an encoder's pooled states, or of the decoder's where there is one."""
    assert model.classifier is not None
    real_BT = batch.source_real_BS if batch.inputs_BT is None else batch.inputs_real_BT
    return model.classifier(pooled(batch.states(model), real_BT, pooling))
