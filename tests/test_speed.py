"""Nothing gets much slower unnoticed: a training step beside a plain torch model of the same shape, in turn."""

import time

import pytest
import torch

from benchmarks import training


def test_a_training_step_takes_no_longer_than_that_of_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours computes logits at masked positions only, so that it should be ahead; a busy machine gets half on top."""
    monkeypatch.setattr(training, "SEQUENCES", 4)
    torch.manual_seed(0)
    case, batch = training.Case("torch.nn", "encoder", training.PlainEncoder), training.make_batch("encoder")
    models = {"peer": training.PlainEncoder(0.0), "ours": training.our_model(case)}
    steps = {name: training.make_step(model, batch, compiled=False) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(6):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    assert min(seconds["ours"]) < 1.5 * min(seconds["peer"])


def test_writing_a_token_costs_no_more_the_longer_the_text_is() -> None:
    """With a cache a step reads one token; without it the last step of 256 would cost as much as reading all."""
    from pipeline.bundle import make_model
    from pipeline.model.config import ModelConfig, resolve
    from pipeline.model.decoding import Decoding
    from pipeline.model.generation import inference

    model = make_model(resolve(ModelConfig(family="decoder", size="tiny")), 512)
    with inference(model):
        decoding, ids_B1 = Decoding(model, None), torch.zeros(4, 1, dtype=torch.long)
        decoding.prompt(ids_B1, None, room=256)
        seconds = []
        for _ in range(255):
            began = time.perf_counter()
            decoding.step(ids_B1)
            seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        model.decode(torch.zeros(4, 256, dtype=torch.long))
        whole = time.perf_counter() - began
    assert min(seconds[-50:]) < 0.5 * whole
