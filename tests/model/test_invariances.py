"""What must not change a result, for every family, position scheme and kind of attention that fit together."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.errors import UserError
from pipeline.model.attention import Attention, LayerCache, Visible, attention_probabilities, visible
from pipeline.model.config import ModelConfig, resolve
from pipeline.model.transformer import Transformer

POSITIONS = ["none", "sinusoidal", "learned", "concatenated", "relative", "t5", "rotary", "alibi"]
VOCABULARY, LENGTH = 40, 11


def fits(family: str, position: str, kind: str) -> bool:
    return kind != "low_rank" or (family != "decoder" and position not in ("relative", "t5", "alibi"))


CASES = [
    (family, position, kind)
    for family in ("encoder", "decoder", "encoder-decoder")
    for position in POSITIONS
    for kind in ("dot", "argmax", "low_rank")
    if fits(family, position, kind)
]
every_case = pytest.mark.parametrize(("family", "position", "kind"), CASES)
every_decoding_case = pytest.mark.parametrize(
    ("family", "position", "kind"), [case for case in CASES if case[0] != "encoder"]
)


def make(family: str, position: str = "rotary", kind: str = "dot", **changes: Any) -> Transformer:
    """A small model with odd sizes, whose every weight matters."""
    torch.manual_seed(1)
    shape: dict[str, Any] = {
        "width": 48,
        "heads": 4,
        "kv_heads": 2,
        "layers": 4,
        "feed_forward": 80,
        "max_positions": 32,
    }
    weights: dict[str, Any] = {"initialisation": "normal", "initial_deviation": 0.15, "zero_output": False}
    config = ModelConfig(family=family, position=position, attention=kind, **shape | weights | changes)  # type: ignore[arg-type]
    model = Transformer(resolve(config), VOCABULARY)
    for parameter in model.parameters():
        if (parameter == 0).all():
            nn.init.normal_(parameter, std=0.2)  # biases and tables too
    return model.eval()


def ids(rows: int, tokens: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def states(model: Transformer, source: Tensor, real: Tensor | None = None, target: Tensor | None = None) -> Tensor:
    """The last states of any family; the target of an encoder-decoder is never padded here."""
    if model.encoder is None:
        return model.decode(source, real)
    memory = model.encode(source, real)
    if model.decoder is None:
        return memory.states_BSC
    return model.decode(ids(len(source), 7, seed=9) if target is None else target, memory=memory)


def assert_same(one: Tensor, other: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@every_case
def test_a_batch_gives_what_its_rows_give_alone(family: str, position: str, kind: str) -> None:
    model = make(family, position, kind)
    batch, target = ids(3), ids(3, 7, seed=9)
    rows = [states(model, batch[row : row + 1], target=target[row : row + 1]) for row in range(3)]
    assert_same(states(model, batch, target=target), torch.cat(rows))


@every_case
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(family: str, position: str, kind: str, side: str) -> None:
    if kind == "low_rank" and side == "left":
        pytest.skip("the learned projection counts positions from the left")
    model = make(family, position, kind)
    source, padding = ids(2), torch.zeros(2, 5, dtype=torch.long)
    parts = [padding, source] if side == "left" else [source, padding]
    real = torch.cat([torch.zeros(2, 5), torch.ones(2, LENGTH)][:: 1 if side == "left" else -1], dim=1).bool()
    padded = states(model, torch.cat(parts, dim=1), real)
    if family != "encoder-decoder":
        padded = padded[:, 5:] if side == "left" else padded[:, :LENGTH]
    assert_same(padded, states(model, source))


@every_decoding_case
def test_cached_decoding_equals_uncached(family: str, position: str, kind: str) -> None:
    model = make(family, position, kind)
    memory = model.encode(ids(2, seed=3)) if model.encoder else None
    target, cache = ids(2), model.new_cache(LENGTH)
    pieces = [model.decode(target[:, :4], memory=memory, cache=cache)]
    pieces += [model.decode(target[:, 4:6], memory=memory, cache=cache)]
    pieces += [model.decode(target[:, n : n + 1], memory=memory, cache=cache) for n in range(6, LENGTH)]
    assert_same(torch.cat(pieces, dim=1), model.decode(target, memory=memory))


def test_cached_decoding_with_padding_on_the_left() -> None:
    for position in POSITIONS:
        model = make("decoder", position)
        target, cache = ids(2), model.new_cache(LENGTH)
        real = torch.ones(2, LENGTH, dtype=torch.bool)
        real[0, :3] = False
        pieces = [model.decode(target[:, :6], real[:, :6], cache=cache)]
        pieces += [model.decode(target[:, n : n + 1], cache=cache) for n in range(6, LENGTH)]
        assert_same(torch.cat(pieces, dim=1)[0, 3:], model.decode(target[:1, 3:])[0])
        assert_same(torch.cat(pieces, dim=1)[1], model.decode(target[1:])[0])


def test_reordered_rows_of_a_cache_go_on_from_each_other() -> None:
    model = make("decoder")
    target, cache = ids(3), model.new_cache(LENGTH)
    model.decode(target[:, :6], cache=cache)
    cache.reorder(torch.tensor([2, 0, 0]))
    after = model.decode(ids(3, 1, seed=5), cache=cache)
    whole = torch.cat([target[[2, 0, 0], :6], ids(3, 1, seed=5)], dim=1)
    assert_same(after, model.decode(whole)[:, -1:])


@every_decoding_case
def test_nothing_comes_from_the_future(family: str, position: str, kind: str) -> None:
    model = make(family, position, kind)
    memory = model.encode(ids(1, seed=3)) if model.encoder else None
    one, other = ids(1), ids(1)
    other[0, 6:] = (other[0, 6:] % (VOCABULARY - 1)) + 1
    assert_same(model.decode(one, memory=memory)[:, :6], model.decode(other, memory=memory)[:, :6])
    assert not torch.allclose(model.decode(one, memory=memory)[:, 6], model.decode(other, memory=memory)[:, 6])


def test_an_encoder_sees_the_future() -> None:
    model = make("encoder")
    one, other = ids(1), ids(1)
    other[0, -1] = (other[0, -1] % (VOCABULARY - 1)) + 1
    assert not torch.allclose(states(model, one)[0, 0], states(model, other)[0, 0])


# --- Masks ---


def test_documents_do_not_see_each_other() -> None:
    for family in ("encoder", "decoder"):
        model = make(family, "alibi")
        both = ids(1, 10)
        documents = torch.tensor([[0] * 4 + [1] * 6])
        joined = (
            model.encode(both, documents_BS=documents).states_BSC
            if model.encoder
            else model.decode(both, documents_BT=documents)
        )
        assert_same(joined[:, :4], states(model, both[:, :4]))
        assert_same(joined[:, 4:], states(model, both[:, 4:]))


def test_a_prefix_is_seen_in_full_and_the_rest_causally() -> None:
    model = make("decoder")
    maps = attention_probabilities(model, lambda: model.decode(ids(2, 6), prefix_B=torch.tensor([3, 0])))
    for weights in maps.values():
        expected = torch.ones(6, 6).tril().bool()
        assert torch.equal(weights[1, 0] > 0, expected)
        expected[:3, :3] = True
        assert torch.equal(weights[0, 0] > 0, expected)


@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_a_window_limits_how_far_a_token_sees(family: str) -> None:
    model = make(family, attention_window=2)
    maps = attention_probabilities(model, lambda: states(model, ids(1, 8)))
    index = torch.arange(8)
    distance = index[:, None] - index
    expected = (distance <= 2) & (distance >= (0 if family == "decoder" else -2))
    assert all(torch.equal(weights[0, 0] > 0, expected) for weights in maps.values())


def test_the_fast_path_takes_no_mask_where_it_needs_none() -> None:
    index = torch.arange(6)
    assert visible(index, index, causal=True) == Visible(causal=True)
    assert visible(index[5:], index, causal=True) == Visible()
    assert visible(index, index, causal=False) == Visible()
    padded = visible(index, index, False, torch.ones(2, 6, dtype=torch.bool)).allowed
    assert padded is not None and padded.shape == (2, 1, 1, 6)  # one row a sequence, not one a query


@pytest.mark.parametrize("kind", ["dot", "argmax"])
def test_a_row_that_sees_nothing_is_zero_and_has_no_gradient(kind: str) -> None:
    module = Attention(make("encoder", "none", kind, bias=False).architecture)
    x = torch.randn(2, 5, 48, requires_grad=True)
    allowed = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    allowed[0, :, 3] = False
    out = module(x, Visible(allowed))
    out.sum().backward()
    assert (out[0, 3] == 0).all() and out[0, 2].abs().sum() > 0
    assert x.grad is not None and not x.grad.isnan().any()
    fully_padded = torch.tensor([[True] * 5, [False] * 5])
    model = make("encoder-decoder", "none", kind)
    assert not model.decode(ids(2), memory=model.encode(ids(2, 5), fully_padded)).isnan().any()


# --- Other implementations ---


def test_attention_equals_torchs_own_modules() -> None:
    model = make("encoder", "none", preset="original", kv_heads=4).architecture
    ours = Attention(model).eval()
    theirs = nn.MultiheadAttention(48, 4, batch_first=True).eval()
    with torch.no_grad():
        for module in (ours.query, ours.key_value, ours.output):
            nn.init.normal_(module.weight, std=0.3)
            nn.init.normal_(module.bias, std=0.3)
        theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key_value.weight]))
        theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, ours.key_value.bias]))
        theirs.out_proj.load_state_dict(ours.output.state_dict())
    x, context, real = torch.randn(2, 5, 48), torch.randn(2, 7, 48), torch.ones(2, 7, dtype=torch.bool)
    real[1, 4:] = False
    expected, weights = theirs(x, context, context, key_padding_mask=~real, average_attn_weights=False)
    seen = Visible(real[:, None, None, :], real_BS=real)
    assert_same(ours(x, seen, context), expected)
    assert_same(ours.probabilities(x, seen, context), weights)


def test_grouped_queries_equal_sdpa_on_repeated_heads() -> None:
    module = Attention(make("encoder", "none").architecture)
    x = torch.randn(2, 6, 48)
    q, k, v = module.project(x, Visible(), None, None, None)
    assert (q.shape[1], k.shape[1]) == (4, 2)
    expected = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True)
    assert_same(module(x, Visible(causal=True)), module.output(expected.transpose(1, 2).flatten(2)))


@every_case
def test_probabilities_are_those_that_weigh_the_values(family: str, position: str, kind: str) -> None:
    model = make(family, position, kind)
    checked = []

    def hook(module: Attention, args: Any, kwargs: Any, output: Tensor) -> None:
        weights = module.probabilities(*args, **kwargs)
        x, seen, context, positions = args[:4]
        _, _, v = module.project(x, seen, context, positions, None)
        v = v.repeat_interleave(module.heads // module.kv_heads, dim=1)
        assert_same(module.output((weights @ v).transpose(1, 2).flatten(2)), output)
        if kind != "low_rank":
            assert_same(weights.sum(-1), torch.ones_like(weights.sum(-1)))
        checked.append(weights)

    for module in model.modules():
        if isinstance(module, Attention):
            module.register_forward_hook(hook, with_kwargs=True)
    states(model, ids(2))
    assert len(checked) == (6 if family == "encoder-decoder" else 4)


# --- Numbers ---


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder-decoder"])
def test_dropout_is_off_in_eval_and_on_in_training(family: str) -> None:
    model = make(family, "learned", dropout=0.5, attention_dropout=0.5, activation_dropout=0.5)
    assert_same(states(model, ids(2)), states(model, ids(2)), tolerance=0)
    model.train()
    assert not torch.allclose(states(model, ids(2)), states(model, ids(2)))


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder-decoder"])
@pytest.mark.parametrize("position", POSITIONS)
def test_bfloat16_agrees_within_its_precision(family: str, position: str) -> None:
    """bfloat16 keeps 8 bits; through four blocks the states agree within 5 % of their size."""
    model = make(family, position, initial_deviation=0.05)
    exact = states(model, ids(2))
    rough = states(model.to(torch.bfloat16), ids(2)).float()
    assert (rough - exact).norm() / exact.norm() < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder-decoder"])
def test_compiled_agrees_with_eager(family: str) -> None:
    model = make(family)
    expected = states(model, ids(2))
    for stack in (model.encoder, model.decoder):
        if stack is not None:
            stack.compile()
    assert_same(states(model, ids(2)), expected, tolerance=1e-4)


@every_case
def test_every_parameter_gets_a_gradient(family: str, position: str, kind: str) -> None:
    model = make(family, position, kind).train()
    model.logits(states(model, ids(4))).square().mean().backward()
    idle = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert idle == []


def test_zero_output_makes_every_block_the_identity() -> None:
    model = make("encoder", "none", zero_output=True, bias=False)
    torch.manual_seed(0)
    model = Transformer(model.architecture, VOCABULARY).eval()
    x = torch.randn(1, 5, 48)
    assert model.encoder is not None
    block = model.encoder.blocks[0]
    assert torch.equal(block(x, Visible(), None, None), x)


@pytest.mark.parametrize("position", ["learned"])
def test_a_sequence_longer_than_its_table_is_one_line(position: str) -> None:
    with pytest.raises(UserError, match="a sequence of 33 tokens, but the model has 32 positions"):
        make("encoder", position).encode(ids(1, 33))
    with pytest.raises(UserError, match="33 tokens"):
        make("encoder", "none", "low_rank").encode(ids(1, 33))


@pytest.mark.parametrize("position", ["sinusoidal", "relative", "t5", "rotary", "alibi"])
def test_schemes_that_extrapolate_do(position: str) -> None:
    assert not make("decoder", position).decode(ids(1, 50)).isnan().any()


def test_a_cache_appends_in_memory_allocated_once() -> None:
    cache = LayerCache(4)
    first, _ = cache.append(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3))
    second, _ = cache.append(torch.zeros(1, 1, 1, 3), torch.zeros(1, 1, 1, 3))
    assert second.shape == (1, 1, 3, 3) and first.data_ptr() == second.data_ptr()
