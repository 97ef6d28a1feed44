"""The numbers that the worksheets on attention ask for, computed through the real modules."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pipeline.model.attention import Attention, Visible, attention_probabilities, visible
from pipeline.model.config import Architecture, ModelConfig, resolve
from pipeline.model.cost import count_flops, count_parameters
from pipeline.model.positions import Concatenated, Relative, Sinusoidal, sinusoids
from pipeline.model.transformer import Transformer


def settings(**changes: Any) -> Architecture:
    plain: dict[str, Any] = {
        "family": "encoder",
        "preset": "original",
        "size": "tiny",
        "bias": False,
        "position": "none",
    }
    return resolve(ModelConfig(**plain | {"dropout": 0.0, "attention_dropout": 0.0} | changes))


def attention(query: Tensor, key: Tensor, value: Tensor, output: Tensor, **changes: Any) -> Attention:
    """Our module with weights that multiply row vectors, as in Q = X W; several heads side by side."""
    heads = changes.pop("heads", 1)
    sizes = {"width": query.shape[0], "heads": heads, "head_width": query.shape[1] // heads}
    module = Attention(settings(**sizes, **changes))
    with torch.no_grad():
        module.query.weight.copy_(query.T)
        module.key_value.weight.copy_(torch.cat([key, value], dim=1).T)
        module.output.weight = torch.nn.Parameter(output.T.clone())
    return module.eval()


def tensor(*rows: list[float]) -> Tensor:
    return torch.tensor(rows)


# --- 000, question 2: weights multiply column vectors ---

H = tensor([5, 1], [4, 3], [-2, 6]).float()
W_Q, W_K, W_V = tensor([1, 0], [2, 9]).float(), tensor([0, 1], [6, 0]).float(), tensor([4, 3], [9, 1]).float()


def test_queries_keys_and_values_of_three_states() -> None:
    module = attention(W_Q.T, W_K.T, W_V.T, torch.eye(2), attention_scale=False)
    q, k, v = (x[0, 0] for x in module.project(H[None], Visible(), None, None, None))
    assert q.tolist() == [[5, 19], [4, 35], [-2, 50]]
    assert k.tolist() == [[1, 30], [3, 24], [6, -12]]
    assert v.tolist() == [[23, 46], [25, 39], [10, -12]]
    assert (q @ k.T)[1].tolist() == [1054, 852, -396]


@pytest.mark.parametrize("kind", ["argmax", "dot"])
def test_hard_attention_takes_the_value_of_the_best_key(kind: str) -> None:
    """With scores this far apart, softmax gives the same."""
    module = attention(W_Q.T, W_K.T, W_V.T, torch.eye(2), attention=kind, attention_scale=False)
    assert module(H[None], Visible())[0, 1].tolist() == [23, 46]


# --- 001, question 1 ---

X = tensor([-2.0, 1.0, 0.5], [1.0, 1.5, -0.5], [-1.5, 1.0, -0.5], [-2.0, -2.5, 1.5])
QUERY = tensor([1, -1.5], [0, 2], [-0.5, -1])
KEY = tensor([-1.5, -1], [2.5, 0], [0.5, -1])
VALUE = tensor([1, 2.5], [-0.5, -2], [0, -1])
OUTPUT = tensor([-1, 1.5, 2], [0, -1, -2], [1, -1.5, 0], [2, 0, 1])


def test_a_single_query() -> None:
    module = attention(torch.eye(3), torch.eye(3), torch.eye(3), torch.eye(3))
    query = tensor([-2.0, 1.0, -1.0])[None]
    weights = module.probabilities(query, Visible(), X[None])[0, 0, 0]
    expected = [0.4653688326, 0.0346311674, 0.4653688326, 0.0346311674]
    torch.testing.assert_close(weights, torch.tensor(expected))
    out = module(query, Visible(), X[None])[0, 0]
    torch.testing.assert_close(out, torch.tensor([-1.6634220815, 0.8961064978, 0.0346311674]))


def test_self_attention_of_one_head() -> None:
    module = attention(QUERY, KEY, VALUE, torch.eye(2, 3))
    out = module(X[None], Visible())[0, :, :2]
    expected = tensor(
        [-0.7522009789, -1.5066872092], [-2.2956486895, -6.5868607699], [-1.0714141503, -2.4759550609],
        [-0.7481218744, -1.4971828981],
    )  # fmt: skip
    torch.testing.assert_close(out, expected)


def test_self_attention_of_two_heads_with_an_output_projection() -> None:
    ones = torch.ones(3, 2)
    query, key, value = (torch.cat([weight, ones], dim=1) for weight in (QUERY, KEY, VALUE))
    out = attention(query, key, value, OUTPUT, heads=2)(X[None], Visible())[0]
    expected = tensor(
        [-6.0466489846, 3.7778107225, -0.7573108608], [8.2874182545, 0.1475029531, 10.5796806823],
        [-7.3905735032, 5.0998276621, -0.0115807301], [-8.2504538936, 4.8742879706, -1.5014032084],
    )  # fmt: skip
    torch.testing.assert_close(out, expected)


# --- 002 ---


def test_thinking_machines() -> None:
    """Scores 112 and 96, divided by the root of 64, give 0.88 and 0.12."""
    module = attention(torch.eye(64), torch.eye(64), torch.eye(64), torch.eye(64))
    keys = torch.zeros(1, 2, 64)
    keys[0, 0, 0], keys[0, 1, 0] = 112, 96
    query = torch.zeros(1, 1, 64)
    query[0, 0, 0] = 1
    weights = module.probabilities(query, Visible(), keys)[0, 0, 0]
    torch.testing.assert_close(weights, torch.tensor([0.880797078, 0.119202922]))


def test_each_head_divides_by_the_root_of_its_own_width() -> None:
    """The worksheet writes the root of D; with H heads the right divisor is the root of D / H."""
    assert Attention(settings(width=64, heads=4)).scale == pytest.approx(1 / math.sqrt(16))


@pytest.mark.parametrize("mean", [0.0, 0.5])
def test_moments_of_a_dot_product(mean: float) -> None:
    """E = Σμ², Var = dσ⁴ + 2σ²Σμ²; with μ = 0 and σ = 1 our scale makes the variance 1."""
    width, sigma, count = 64, 1.0, 20_000
    draw = torch.Generator().manual_seed(1)
    q, k = (mean + sigma * torch.randn(count, width, generator=draw) for _ in range(2))
    products = (q * k).sum(1)
    expected = width * sigma**4 + 2 * sigma**2 * width * mean**2
    assert products.mean().item() == pytest.approx(width * mean**2, abs=4 * math.sqrt(expected / count))
    assert products.var().item() == pytest.approx(expected, rel=0.05)
    scale = Attention(settings(width=width, heads=1)).scale
    assert (products * scale).var().item() == pytest.approx(expected / width, rel=0.05)


def test_a_position_sees_itself_and_what_came_before() -> None:
    """The worksheet states the rule with its indices swapped; right is that i sees j ≤ i."""
    model = Transformer(settings(family="decoder"), 20).eval()
    maps = attention_probabilities(model, lambda: model.decode(torch.arange(6)[None]))
    for weights in maps.values():
        assert torch.equal(weights[0, 0] > 0, torch.ones(6, 6).tril().bool())


def growth(part: str, family: str, source: int, target: int) -> float:
    """How the measured cost of one part grows when one length doubles."""
    return float(getattr(count_flops(settings(family=family), 50, source, target, 0), part))


def test_costs_grow_as_the_worksheets_derive() -> None:
    """M²k, MNk and N²k; the formulas equal the FLOP counter's in tests/model/test_cost.py."""
    family = "encoder-decoder"
    assert growth("encoder_attention", family, 64, 8) == 4 * growth("encoder_attention", family, 32, 8)
    assert growth("decoder_attention", family, 8, 64) == 4 * growth("decoder_attention", family, 8, 32)
    assert growth("cross_attention", family, 64, 32) == 2 * growth("cross_attention", family, 32, 32)
    assert growth("cross_attention", family, 64, 64) == 4 * growth("cross_attention", family, 32, 32)
    wide = count_flops(settings(width=256, heads=4, head_width=64), 50, 32, 0, 0).encoder_attention
    assert wide == 2 * count_flops(settings(width=128, heads=4), 50, 32, 0, 0).encoder_attention


def test_the_encoder_does_not_depend_on_the_decoder_and_a_second_language_is_cheap() -> None:
    model = Transformer(settings(family="encoder-decoder"), 30).eval()
    source, first, second = torch.randint(0, 30, (3, 1, 12), generator=torch.Generator().manual_seed(0))
    memory = model.encode(source)
    before = memory.states_BSC.clone()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        one = model.decode(first, memory=memory)
    again = model.decode(second, memory=memory)
    assert torch.equal(memory.states_BSC, before) and not torch.equal(one, again)
    assert counter.get_total_flops() < count_flops(model.architecture, 30, 12, 12, 0).forward
    whole, half = (count_flops(model.architecture, 30, tokens, 12, 0) for tokens in (128, 64))
    assert whole.cross_attention == 2 * half.cross_attention  # what a second language costs grows with M, not M²


# --- 003, question 3 ---


def low_rank_case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States whose unnormalised scores have rank 2, and the top right singular vectors of those scores."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(9, 6, generator=draw)
    query = torch.randn(6, 2, generator=draw) @ torch.randn(2, 6, generator=draw)
    key, value = torch.randn(6, 6, generator=draw), torch.randn(6, 6, generator=draw)
    scores = (x @ query) @ (x @ key).T / math.sqrt(6)
    assert torch.linalg.matrix_rank(scores) == 2
    return x, query, key, value


def test_linear_attention_by_projection_equals_full_attention_of_that_rank() -> None:
    x, query, key, value = low_rank_case()
    scores = (x @ query) @ (x @ key).T / math.sqrt(6)
    right = torch.linalg.svd(scores).Vh[:2]
    module = attention(
        query,
        key,
        value,
        torch.eye(6),
        attention="low_rank",
        attention_rank=2,
        max_positions=9,
        attention_normalise="none",
    )
    with torch.no_grad():
        module.key_mixer.copy_(right)
        module.value_mixer.copy_(right)
    torch.testing.assert_close(module(x[None], Visible())[0], scores @ (x @ value), rtol=1e-4, atol=1e-4)


def test_low_rank_attention_costs_nkd() -> None:
    low, longer = (count_flops(settings(attention="low_rank", attention_rank=8), 50, n, 0, 0) for n in (256, 512))
    assert longer.encoder_attention == 2 * low.encoder_attention
    assert low.encoder_attention < count_flops(settings(), 50, 256, 0, 0).encoder_attention / 8


def test_the_product_with_values_from_the_svd_costs_nkd() -> None:
    n, k, d = 64, 4, 16
    draw = torch.Generator().manual_seed(5)
    probabilities = torch.randn(n, k, generator=draw) @ torch.randn(k, n, generator=draw)
    values = torch.randn(n, d, generator=draw)
    u, s, vh = torch.linalg.svd(probabilities)
    with FlopCounterMode(display=False) as counter:
        product = u[:, :k] @ (s[:k, None] * (vh[:k] @ values))
    torch.testing.assert_close(product, probabilities @ values, rtol=1e-3, atol=1e-3)
    assert counter.get_total_flops() == 2 * 2 * n * k * d


def test_a_hidden_position_gets_no_gradient_for_its_key_and_value() -> None:
    module = attention(torch.eye(3), torch.eye(3), torch.eye(3), torch.eye(3))
    context = X[None].clone().requires_grad_()
    real = torch.tensor([[True, True, False, True]])
    index = torch.arange(4)
    module(X[None, :2], visible(index[:2], index, False, real), context).sum().backward()
    assert context.grad is not None
    assert (context.grad[0, 2] == 0).all() and (context.grad[0, [0, 1, 3]] != 0).any(1).all()


# --- 004 ---


def test_added_and_concatenated_positions_give_the_dot_products_of_the_worksheet() -> None:
    draw = torch.Generator().manual_seed(7)
    words = torch.randn(1, 2, 8, generator=draw)
    places = torch.arange(2)
    p = sinusoids(places, 8, torch.float32)
    added = Sinusoidal().embed(words, places)[0]
    x = words[0]
    expected = x[0] @ x[1] + x[0] @ p[1] + p[0] @ x[1] + p[0] @ p[1]
    torch.testing.assert_close(added[0] @ added[1], expected)
    beside = Concatenated(8).embed(words, places)[0]
    torch.testing.assert_close(beside[0] @ beside[1], x[0] @ x[1] + p[0] @ p[1])


def test_a_bias_of_position_products_equals_concatenated_positions() -> None:
    draw = torch.Generator().manual_seed(8)
    words, width = torch.randn(1, 5, 6, generator=draw), 4
    places = torch.arange(5)
    p = sinusoids(places, width, torch.float32)
    beside = Concatenated(width).embed(words, places)
    eye, value = torch.eye(6 + width), torch.cat([torch.eye(6), torch.zeros(width, 6)])
    pad = torch.cat([value, torch.zeros(6 + width, width)], dim=1)
    both = attention(eye, eye, pad, eye, attention_scale=False)(beside, Visible())[..., :6]
    alone = attention(torch.eye(6), torch.eye(6), torch.eye(6), torch.eye(6), attention_scale=False)
    torch.testing.assert_close(alone(words, Visible(), bias_HTS=(p @ p.T)[None]), both)


@pytest.mark.parametrize(("heads", "clip", "expected"), [(4, 127, 1020), (4, 16, 132)])
def test_relative_biases_have_so_many_parameters_a_layer(heads: int, clip: int, expected: int) -> None:
    """(2(T − 1) + 1) × heads for a context of 128, or (2k + 1) × heads when clipped."""
    assert Relative(1, heads, clip).table.numel() == expected
    model = settings(position="relative", relative_clip=clip, heads=heads, layers=3)
    assert count_parameters(model, 10).positions == 3 * expected


@pytest.mark.parametrize(("heads", "layers", "expected"), [(1, 4, 16), (2, 3, 27), (3, 2, 16)])
def test_hard_attention_sees_at_most_so_many_positions(heads: int, layers: int, expected: int) -> None:
    """(k + 1)ⁿ, through the residual stream: counted by which inputs get a gradient."""
    torch.manual_seed(heads)
    shape = {"heads": heads, "width": 24 * heads, "layers": layers, "position": "sinusoidal", "norm_place": "pre"}
    wide = {"initialisation": "normal", "initial_deviation": 0.2}
    model = Transformer(settings(attention="argmax", **shape, **wide), 50).eval()
    ids = torch.randint(0, 50, (1, 60))
    x = (model.embedding(ids) * model.scale).detach().requires_grad_()
    assert model.encoder is not None
    reached = []
    for position in range(0, 60, 7):
        (gradient,) = torch.autograd.grad(model.encoder(x)[0, position].sum(), x)
        reached.append(int((gradient[0].abs().sum(-1) > 0).sum()))
    assert max(reached) <= expected
    assert max(reached) > heads + 1  # deeper layers do see further


def test_a_masked_token_keeps_its_position() -> None:
    """Two masks of one sequence have different states, since only the word is hidden, not the place."""
    model = Transformer(settings(position="sinusoidal"), 20).eval()
    ids = torch.tensor([[3, 6, 5, 6, 4]])  # 6 stands for the mask
    states = model.encode(ids).states_BSC[0]
    assert not torch.allclose(states[1], states[3], atol=1e-3)
    blind = Transformer(settings(), 20).eval().encode(ids).states_BSC[0]
    torch.testing.assert_close(blind[1], blind[3])
