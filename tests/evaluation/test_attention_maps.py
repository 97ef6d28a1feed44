"""Pictures of attention show the exact probabilities, and masks what the models really let a token see."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline import cli
from pipeline.bundle import Bundle, make_model, save_bundle
from pipeline.data.config import TaskConfig, TokenizerConfig
from pipeline.data.tasks import TASKS, Encoder
from pipeline.evaluation.attention_maps import Map, draw_grid, draw_masks, example_masks, find_maps
from pipeline.evaluation.page import example_of
from pipeline.model.attention import Attention
from pipeline.model.config import ModelConfig, resolve
from pipeline.model.recurrent import Recurrent
from pipeline.tokenizer import Tokenizer, train

SOURCE, TARGET = [9, 12, 11, 10, 12], [1, 10, 11, 12]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(["abcd dcba"] * 9, TokenizerConfig(kind="character"), "")


def make(tokenizer: Tokenizer, **settings: Any) -> Any:
    torch.manual_seed(3)
    given: dict[str, Any] = {
        "width": 32,
        "layers": 4,
        "heads": 2,
        "size": "tiny",
        "zero_output": False,
        "qk_norm": False,
    } | settings
    model = make_model(resolve(ModelConfig(**given)), tokenizer.vocab_size).eval()
    for parameter in model.parameters():  # so that no two weights are alike
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


@torch.inference_mode()
@pytest.mark.parametrize("position", ["rotary", "alibi", "t5", "none"])
def test_maps_make_the_output_of_attention_again(tokenizer: Tokenizer, position: str) -> None:
    """What a layer really computes, on its fast path, is the map times its values."""
    model = make(tokenizer, family="encoder-decoder", position=position)
    computed: list[tuple[Attention, Tensor, Tensor]] = []

    def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        context = kwargs.get("context_BSC", args[2] if len(args) > 2 else None)
        computed.append((module, args[0] if context is None else context, out))

    for module in model.modules():
        if isinstance(module, Attention):
            module.register_forward_hook(record, with_kwargs=True)
    maps = find_maps(model, tokenizer, SOURCE, TARGET)
    assert [(one.kind, one.layer) for one in maps] == [
        ("encoder", 1), ("encoder", 2), ("decoder", 1), ("cross", 1), ("decoder", 2), ("cross", 2),
    ]  # fmt: skip
    for one, (module, inputs, out) in zip(maps, computed, strict=True):
        values = module.key_value(inputs).unflatten(-1, (2 * module.kv_heads, -1)).transpose(1, 2).chunk(2, 1)[1]
        again = module.output((one.heads_HTS @ values).transpose(1, 2).flatten(2))
        torch.testing.assert_close(again, out, rtol=1e-4, atol=1e-5)
        rows, columns = (SOURCE if one.kind == "encoder" else TARGET), (TARGET if one.kind == "decoder" else SOURCE)
        assert (len(one.queries), len(one.keys)) == (len(rows), len(columns))


def test_a_prefix_is_drawn_as_it_is_read(tokenizer: Tokenizer) -> None:
    """Its tokens look at later ones of it; what follows looks back only."""
    model = make(tokenizer, family="decoder")
    (weights, *_), (causal, *_) = (
        [one.heads_HTS for one in find_maps(model, tokenizer, None, TARGET, prefix)] for prefix in (3, 0)
    )
    assert (weights[:, 0, 1:3] > 0).all() and (weights[:, :3, 3:] == 0).all() and (causal[:, 0, 1:] == 0).all()


@torch.inference_mode()
@pytest.mark.parametrize("alignment", ["dot", "general", "location"])
def test_alignments_of_recurrent_models(tokenizer: Tokenizer, alignment: str) -> None:
    model = make(tokenizer, family="recurrent", preset="original", alignment=alignment, layers=2)
    (found,) = find_maps(model, tokenizer, SOURCE, TARGET)
    assert isinstance(model, Recurrent) and model.attention is not None
    memory = model.encode(torch.tensor([SOURCE]))
    weights = model.attention.probabilities(model.read(torch.tensor([TARGET]), None, memory, None), memory)
    assert found.kind == "cross" and torch.equal(found.heads_HTS, weights)


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder-decoder", "recurrent"])
@pytest.mark.parametrize("task", ["sentiment", "retrieval", "reversal"])
def test_the_page_draws_what_the_task_reads(tokenizer: Tokenizer, family: Any, task: Any) -> None:
    """With the class token before a text, or the end token after it; a recurrent model looks from its begin token."""
    ids, first, end = tokenizer.encode("abc"), tokenizer.first, tokenizer.id("end")
    expected: dict[str, tuple[list[int] | None, list[int] | None]] = {
        "encoder": ([tokenizer.id("class"), *ids], None),
        "decoder": (None, [first, *ids, end]),
        "encoder-decoder": ([*ids, end], [first] if task == "sentiment" else None),
        "recurrent": ([*ids, end], [first]),
    }
    if task == "reversal":
        written = tokenizer.encode("cba")
        expected |= dict.fromkeys(("encoder-decoder", "recurrent"), ([*ids, end], [first, *written]))
        expected["decoder"] = (None, [first, *ids, tokenizer.id("separator"), *written])
    if family not in TASKS[task].families:
        return
    architecture = resolve(ModelConfig(family=family, size="tiny"))
    encoder = Encoder(TaskConfig(name=task), architecture, tokenizer, ["cba"], 16, 16)
    example = example_of(encoder, {"source": "abc", "expected": "cba"})
    read = tuple(None if part is None else part.tolist() for part in (example.source, example.inputs))
    assert read == expected[family]


def test_the_numbers_in_a_picture_are_the_probabilities(tokenizer: Tokenizer) -> None:
    maps = find_maps(make(tokenizer, family="decoder"), tokenizer, None, TARGET)
    grid = draw_grid(maps)
    for axes, weights_TS in zip(grid.axes, [head for one in maps for head in one.heads_HTS], strict=True):
        assert np.array_equal(axes.images[0].get_array(), weights_TS)
        assert [label.get_text() for label in axes.get_yticklabels()] == maps[0].queries
    single = draw_grid(maps[1:2], head=2).axes[0]
    assert np.array_equal(single.images[0].get_array(), maps[1].heads_HTS[1])
    written = [text.get_text() for text in single.texts]
    assert written == [f"{weight:.2f}" for weight in maps[1].heads_HTS[1].flatten().tolist()]
    assert np.triu(single.images[0].get_array(), 1).max() == 0, "a decoder looks ahead"


def test_mixtures_of_all_tokens_are_numbered(tokenizer: Tokenizer) -> None:
    """The keys of low-rank attention, in which no token stands for itself."""
    model = make(tokenizer, family="encoder-decoder", attention="low_rank", attention_rank=3)
    for one in find_maps(model, tokenizer, SOURCE, TARGET):
        assert one.keys == (one.queries if one.kind == "decoder" else ["1", "2", "3"])
        assert one.heads_HTS.shape[1:] == (len(one.queries), len(one.keys))


def test_a_long_text_makes_no_picture_of_gigabytes(tmp_path: Path) -> None:
    words = [str(number) for number in range(200)]
    maps = [Map("encoder", layer, torch.rand(12, 200, 200), words, words) for layer in range(1, 13)]
    assert np.prod(110 * draw_grid(maps).get_size_inches()) < 50e6  # pixels, of four bytes each while it is drawn
    header = draw_masks(words, tmp_path / "masks.png").read_bytes()[16:24]
    assert int.from_bytes(header[:4], "big") * int.from_bytes(header[4:], "big") < 10e6


def test_tokens_may_be_dollars(tmp_path: Path) -> None:
    """Two of them begin and end mathematics for matplotlib, which fails where there is nothing between."""
    assert draw_masks(["$", "$$", "a", "$$$"], tmp_path / "masks.png").is_file()


def test_masks_are_those_of_the_definitions(tmp_path: Path) -> None:
    rows, columns = np.indices((8, 8))
    masks = {name: mask.numpy() for name, mask in example_masks(8).items()}
    assert np.array_equal(masks["padding"], columns < 6)
    assert np.array_equal(masks["causal"], columns <= rows)
    assert np.array_equal(masks["prefix"], (columns <= rows) | (columns < 4))
    assert np.array_equal(masks["document"], (columns <= rows) & ((columns < 4) == (rows < 4)))
    assert np.array_equal(masks["cross, from the first half"], (columns < 6)[:4])
    assert draw_masks(list("abcdefgh"), tmp_path / "masks.png").read_bytes().startswith(b"\x89PNG")


def test_layers_and_heads_by_command(tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_bundle(Bundle(make(tokenizer, family="encoder-decoder"), tokenizer), tmp_path / "bundle")
    command = ["attention", str(tmp_path / "bundle"), "abcd", "--target", "dcb", "--output", str(tmp_path / "maps")]
    assert cli.main(command) == 0
    assert [Path(line).stem for line in capsys.readouterr().out.split()] == ["encoder", "decoder", "cross", "masks"]
    assert cli.main([*command, "--layer", "2", "--head", "1"]) == 0
    assert (tmp_path / "maps" / "cross-layer-2-head-1.png").is_file()
    assert cli.main([*command, "--layer", "2", "--head", "5"]) == 2
    assert "no head 5 in layer 2" in capsys.readouterr().err
    assert cli.main([*command, "--layer", "0"]) == 2
