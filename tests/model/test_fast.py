"""Our own kernels give what torch's slower ones give, values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model import fast
from pipeline.model.fast import RMSNorm, attend, dropped, keep_freed_memory, squared_relu


def gradients(result: Tensor, *inputs: Tensor) -> list[Tensor]:
    outer = torch.randn(result.shape, generator=torch.Generator().manual_seed(3))
    return list(torch.autograd.grad(result, inputs, outer))


@pytest.mark.parametrize("shape", [(7, 32), (2, 5, 32), (2, 5, 3, 32)])
@pytest.mark.parametrize("apart", [False, True])
def test_the_norm_is_torchs(shape: tuple[int, ...], apart: bool) -> None:
    """For states and for heads, also when they do not lie side by side in memory."""
    torch.manual_seed(1)
    x = 3 * torch.randn(shape) + 1
    if apart:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    x.requires_grad_()
    ours, theirs = RMSNorm(32, 1e-3), nn.RMSNorm(32, 1e-3)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight.normal_(1.0, 0.5))
    torch.testing.assert_close(ours(x), theirs(x))
    for own, other in zip(gradients(ours(x), x, ours.weight), gradients(theirs(x), x, theirs.weight), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def test_squared_relu_is_relu_squared() -> None:
    x = torch.randn(4, 9, requires_grad=True)
    plain = F.relu(x).square()
    torch.testing.assert_close(squared_relu(x), plain, rtol=0, atol=0)
    torch.testing.assert_close(gradients(squared_relu(x), x), gradients(plain, x))


@pytest.fixture
def no_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's functions are not to be called."""

    def refuse(*_: object) -> None:
        raise AssertionError("not for this")

    monkeypatch.setattr(fast.Normalised, "apply", refuse)
    monkeypatch.setattr(fast.SquaredReLU, "apply", refuse)


@pytest.mark.usefixtures("no_function")
def test_without_gradients_the_operations_are_called_plainly() -> None:
    """Writing calls them for one token at a time, where the call of a function of autograd's would cost more."""
    x = torch.randn(3, 8)
    ours, theirs = RMSNorm(8, 1e-3), nn.RMSNorm(8, 1e-3)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight.normal_(1.0, 0.5))
        torch.testing.assert_close(ours(x), theirs(x))
        torch.testing.assert_close(squared_relu(x), F.relu(x).square(), rtol=0, atol=0)


@pytest.mark.usefixtures("no_function")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_numbers_take_torchs_way(dtype: torch.dtype) -> None:
    x = torch.randn(3, 8).to(dtype)
    assert RMSNorm(8, 1e-6).to(dtype)(x).dtype == squared_relu(x).dtype == dtype


def test_16_bits_are_rounded_once_at_the_end() -> None:
    """In mixed precision the norm and the activation are those of the same numbers in 32 bits, but for the rounding."""
    torch.manual_seed(1)
    narrow = (3 * torch.randn(5, 7, 32)).bfloat16()
    norm = RMSNorm(32, 1e-3)
    nn.init.normal_(norm.weight, 1.0, 0.5)
    for operation, inputs in ((norm, [norm.weight]), (squared_relu, [])):
        found = []
        for x in (narrow.clone().requires_grad_(), narrow.float().requires_grad_()):
            result = operation(x)
            assert result.dtype == x.dtype
            outer = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).bfloat16().to(x.dtype)
            found.append([result, *torch.autograd.grad(result, [x, *inputs], outer)])
        for own, wide in zip(*found, strict=True):
            torch.testing.assert_close(own.float(), wide, rtol=2**-7, atol=2**-6)


MASKS = {
    "all": lambda rows, queries, keys: None,
    "padding": lambda rows, queries, keys: torch.arange(keys) < torch.randint(1, keys, (rows, 1, 1, 1)),
    "each its own": lambda rows, queries, keys: torch.rand(rows, 1, queries, keys) < 0.7,
}


@pytest.mark.parametrize("mask", [*MASKS, "causal"])
@pytest.mark.parametrize(("heads", "shared"), [(2, 1), (4, 2)])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (5, 12)])
def test_attention_by_products_is_torchs(mask: str, heads: int, shared: int, queries: int, keys: int) -> None:
    """Values and gradients, for every mask, with heads that share keys; and it is the way that is taken."""
    torch.manual_seed(2)
    q = torch.randn(3, queries, heads, 8).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(3, keys, heads // shared, 8).transpose(1, 2).requires_grad_() for _ in range(2))
    allowed = None if mask == "causal" else MASKS[mask](3, queries, keys)
    causal = mask == "causal"
    theirs = F.scaled_dot_product_attention(q, k, v, allowed, 0.0, causal, scale=0.3, enable_gqa=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", None)
        ours = attend(q, k, v, allowed, 0.0, causal, 0.3)
    torch.testing.assert_close(ours, theirs)
    for own, other in zip(gradients(ours, q, k, v), gradients(theirs, q, k, v), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def test_a_query_that_sees_nothing_gets_zeros_and_gives_none() -> None:
    q, k, v = (torch.randn(2, 1, 4, 8, requires_grad=True) for _ in range(3))
    allowed = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    allowed[1, :, 2] = False
    out = attend(q, k, v, allowed, 0.0, False, 1.0)
    assert out[1, 0, 2].abs().max() == 0 and out[1, 0, 1].abs().min() > 0
    of_q, of_k, of_v = gradients(out, q, k, v)
    assert of_q[1, 0, 2].abs().max() == 0 and all(bool(of.isfinite().all()) for of in (of_q, of_k, of_v))


def test_scores_are_kept_for_short_sequences_only() -> None:
    """A sequence of a thousand tokens takes torch's kernel, whose memory grows with its length alone."""
    wide, narrow = torch.float32, torch.bfloat16
    for length, dtype, kept in ((32, wide, True), (33, wide, False), (512, narrow, True), (513, narrow, False)):
        q = torch.randn(1, 1, length, 8, dtype=dtype, requires_grad=True)
        assert fast.products_are_faster(q, q, None, 0.0) is kept
        assert fast.products_are_faster(q, q, None, 0.1), "with dropout torch keeps them too"
        assert not fast.products_are_faster(q, q, torch.zeros(length, length), 0.0)
        assert not fast.products_are_faster(q.detach(), q.detach(), None, 0.0)
        with torch.no_grad():
            assert not fast.products_are_faster(q, q, None, 0.0)


def test_dropout_falls_on_probabilities() -> None:
    """With values of one place each, what comes out is a probability, larger by what was dropped, or nothing."""
    torch.manual_seed(3)
    q, k = (torch.randn(4, 2, 16, 8, requires_grad=True) for _ in range(2))
    out = attend(q, k, torch.eye(16).expand(4, 2, 16, 16), None, 0.25, False, 0.5).detach()
    whole = (q @ k.mT * 0.5).softmax(-1).detach() / 0.75
    kept = out != 0
    torch.testing.assert_close(out[kept], whole[kept])
    assert 0.6 < float(kept.float().mean()) < 0.9


def test_attention_in_16_bits_is_that_of_32_but_for_rounding() -> None:
    torch.manual_seed(3)
    inputs = [torch.randn(2, 2, 40, 16).bfloat16().requires_grad_() for _ in range(3)]
    wide = [tensor.detach().float().requires_grad_() for tensor in inputs]
    ours = attend(inputs[0], inputs[1], inputs[2], None, 0.0, True, 0.25)
    theirs = F.scaled_dot_product_attention(wide[0], wide[1], wide[2], is_causal=True)
    outer = torch.randn(ours.shape).bfloat16()
    found = [ours, *torch.autograd.grad(ours, inputs, outer)]
    expected = [theirs, *torch.autograd.grad(theirs, wide, outer.float())]
    for own, other in zip(found, expected, strict=True):
        assert own.dtype == torch.bfloat16 and float((own.float() - other).norm() / other.norm()) < 0.02


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5])
def test_dropout_drops_its_share_and_keeps_the_mean(rate: float) -> None:
    """For numbers of any count, in values and gradients alike, and the same for a seed."""
    x = torch.ones(401, 503, requires_grad=True)
    torch.manual_seed(4)
    result = dropped(x, rate)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    torch.testing.assert_close(gradient, result)
    share = float((result == 0).float().mean())
    assert share == pytest.approx(rate, abs=4 * (rate * (1 - rate) / x.numel()) ** 0.5)  # four deviations
    assert float(result.detach().max()) == pytest.approx(1 / (1 - rate), rel=1e-4)
    neighbours = (result[:, 1:] == 0) & (result[:, :-1] == 0)
    assert float(neighbours.float().mean()) == pytest.approx(rate**2, rel=0.1)
    torch.manual_seed(4)
    torch.testing.assert_close(dropped(x, rate), result, rtol=0, atol=0)
    assert not torch.equal(dropped(x, rate), result)
    assert dropped(x, rate, training=False) is x and dropped(x, 0.0) is x


def test_memory_can_be_kept_on_any_system() -> None:
    keep_freed_memory()
    keep_freed_memory()
    assert len(torch.zeros(20_000_000)) == 20_000_000
