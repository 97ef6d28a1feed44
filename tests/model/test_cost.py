"""What a model costs, against the real model and torch's own counter."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipeline.errors import UserError
from pipeline.model.config import PRESETS, Architecture, ModelConfig, resolve
from pipeline.model.cost import activation_bytes, count_flops, count_parameters
from pipeline.model.transformer import Transformer

VARIANTS: list[dict[str, Any]] = [
    {},
    {"position": "relative"},
    {"position": "concatenated", "kv_heads": 2},
    {"position": "learned", "norm_place": "both"},
    {"attention": "low_rank", "position": "sinusoidal"},
    {"activation": "relu_squared", "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
]
CASES = [
    (family, preset, variant)
    for family in ("encoder", "decoder", "encoder-decoder")
    for preset in PRESETS
    for variant in VARIANTS
    if (family, variant.get("attention")) != ("decoder", "low_rank")
]
SOURCE, TARGET = 48, 40  # longer than those of which a CPU keeps all scores


def architecture(family: str, preset: str, variant: dict[str, Any]) -> Architecture:
    return resolve(ModelConfig(family=family, preset=preset, size="tiny", **variant))  # type: ignore[arg-type]


def lengths(model: Architecture) -> tuple[int, int]:
    return SOURCE if model.encoder_layers else 0, TARGET if model.decoder_layers else 0


def run(model: Transformer, batch: int) -> Tensor:
    source, target = (torch.zeros(batch, tokens, dtype=torch.long) for tokens in (SOURCE, TARGET))
    if model.encoder is None:
        return model.decode(target)
    memory = model.encode(source)
    return memory.states_BSC if model.decoder is None else model.decode(target, memory=memory)


@pytest.mark.parametrize(("family", "preset", "variant"), CASES)
def test_parameters_and_flops_are_exactly_the_models(family: str, preset: str, variant: dict[str, Any]) -> None:
    settings = architecture(family, preset, variant)
    model = Transformer(settings, 77).eval()
    assert count_parameters(settings, 77).total == sum(parameter.numel() for parameter in model.parameters())
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model.logits(run(model, 1)[:, :5])
    assert count_flops(settings, 77, *lengths(settings), loss_positions=5).forward == counter.get_total_flops()


@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[4]], ids=str)
def test_a_decoder_that_does_not_run_costs_nothing(variant: dict[str, Any]) -> None:
    """As in retrieval, which looks at the states of the encoder."""
    settings = architecture("encoder-decoder", "llama", variant)
    model = Transformer(settings, 77).eval()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model.encode(torch.zeros(1, SOURCE, dtype=torch.long))
    assert count_flops(settings, 77, SOURCE, 0, 0).forward == counter.get_total_flops()


def test_training_costs_three_times_the_forward_pass() -> None:
    settings = architecture("decoder", "llama", {})
    model = Transformer(settings, 77)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.logits(run(model, 1)).sum().backward()
    assert counter.get_total_flops() == count_flops(settings, 77, 0, TARGET, TARGET).training


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder-decoder"])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[3], VARIANTS[5]], ids=str)
def test_activation_memory_is_what_autograd_keeps(family: str, preset: str, variant: dict[str, Any]) -> None:
    settings = architecture(family, preset, variant | {"zero_output": False})
    model = Transformer(settings, 77).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run(model, 8)
    real = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert 8 * activation_bytes(settings, *lengths(settings)) == pytest.approx(real, rel=0.15)


def test_sizes_are_those_of_the_design() -> None:
    """Published models count the same: BERT-base 110M without its pooler and segments, GPT-2 small 124M."""
    bert = resolve(ModelConfig(family="encoder", preset="bert", size="base"))
    assert count_parameters(bert, 30_522).total == 109_514_298 - 2 * 768  # as in transformers, less its two segments
    gpt2 = resolve(ModelConfig(family="decoder", preset="gpt2", size="base"))
    assert count_parameters(gpt2, 50_257).total == 124_439_808
    small = resolve(ModelConfig(family="encoder-decoder", size="small"))
    assert (small.width, small.encoder_layers, small.decoder_layers, small.head_width) == (256, 3, 3, 64)
    assert resolve(ModelConfig(size="mini")).head_width == 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 6, "kv_heads": 4}, "cannot share"),
        ({"heads": 512}, "head_width"),
        ({"head_width": 0}, "head_width"),
        ({"width": 0}, "width"),
        ({"dropout": 1.0}, "dropout"),
        ({"family": "decoder", "attention": "low_rank"}, "low_rank mixes all positions"),
        ({"attention": "low_rank", "position": "alibi"}, "no biases"),
        ({"attention_normalise": "none"}, "low_rank attention only"),
        ({"family": "encoder", "decoder_layers": 2}, "encoder cannot have"),
        ({"family": "encoder-decoder", "layers": 1}, "cannot have 1 encoder and 0 decoder layers"),
        ({"head_width": 33}, "even head width"),
        ({"position": "concatenated", "position_width": 256}, "within the width"),
        ({"position": "t5", "position_buckets": 2}, "at least 4"),
        ({"attention_window": -1}, "negative"),
    ],
)
def test_contradictions_fail_when_the_config_is_read(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        ModelConfig(**settings)
    assert "\n" not in str(caught.value)
