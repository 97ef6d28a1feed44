"""Products by oneDNN give what torch's own give, values and gradients; only what suits them takes them."""

import pytest
import torch
from torch import Tensor, nn

from pipeline.model import products
from pipeline.model.config import ModelConfig, resolve
from pipeline.model.products import LEAST_ROWS, Linear, added_products, product_over_rows, suits_onednn
from pipeline.model.transformer import Transformer
from pipeline.training.optim import orthogonal

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A processor on which oneDNN is taken, and the rows of each of its products."""
    rows: list[int] = []
    plain = products.onednn_linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows.append(x.numel() // x.shape[-1])
        return plain(x, weight, bias)

    monkeypatch.setattr(products, "onednn_is_ahead", lambda: True)
    monkeypatch.setattr(products, "onednn_linear", counted)
    return rows


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(LEAST_ROWS, 72), (5, 30, 72), (2, 8, 9, 72)])
def test_a_layer_and_its_gradients_are_torchs(shape: tuple[int, ...], bias: bool, ahead: list[int]) -> None:
    torch.manual_seed(1)
    x = torch.randn(shape, requires_grad=True)
    ours, theirs = Linear(72, 96, bias=bias), nn.Linear(72, 96, bias=bias)
    theirs.load_state_dict(ours.state_dict())
    result, expected = ours(x), theirs(x)
    assert len(ahead) == 1
    torch.testing.assert_close(result, expected)
    outer = torch.randn_like(expected)
    found = torch.autograd.grad(result, [x, *ours.parameters()], outer)
    assert len(ahead) == 3
    for own, other in zip(found, torch.autograd.grad(expected, [x, *theirs.parameters()], outer), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 80), (80, 64)])
def test_sums_over_rows_whichever_side_is_narrower(outputs: int, inputs: int, ahead: list[int]) -> None:
    torch.manual_seed(1)
    one, other = torch.randn(100, outputs), torch.randn(100, inputs)
    torch.testing.assert_close(product_over_rows(one, other), one.T @ other, rtol=1e-4, atol=1e-4)
    assert ahead == [64]


def test_a_frozen_layer_and_an_input_without_gradient_cost_nothing(ahead: list[int]) -> None:
    layer = Linear(24, 40)
    layer.weight.requires_grad_(False)
    layer(torch.randn(LEAST_ROWS, 24)).sum().backward()
    assert len(ahead) == 1 and layer.weight.grad is None
    torch.testing.assert_close(layer.bias.grad, torch.full((40,), float(LEAST_ROWS)))


def test_stacks_of_matrices_and_what_is_added(ahead: list[int]) -> None:
    torch.manual_seed(1)
    one, other, added = torch.randn(3, 96, 96), torch.randn(3, 96, 96), torch.randn(3, 96, 96)
    expected = torch.baddbmm(added, one, other, beta=0.5, alpha=2.0)
    torch.testing.assert_close(added_products(added, one, other, beta=0.5, alpha=2.0), expected, rtol=1e-4, atol=1e-4)
    assert ahead == [96] * 3


def test_muon_makes_the_same_matrices_orthogonal(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    for shape in ((2, 64, 64), (2, 64, 256), (2, 256, 64)):
        matrices = torch.randn(shape)
        expected = orthogonal(matrices, 5)
        with monkeypatch.context() as patched:
            patched.setattr(products, "onednn_is_ahead", lambda: True)
            torch.testing.assert_close(orthogonal(matrices, 5), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder-decoder"])
def test_a_model_learns_the_same(family: str, ahead: list[int]) -> None:
    """The loss and every gradient, with a vocabulary whose logits come in chunks."""
    torch.manual_seed(1)
    settings = resolve(ModelConfig(family=family, size="tiny", layers=2, zero_output=False))  # type: ignore[arg-type]
    model = Transformer(settings, 300)
    ids = torch.randint(0, 300, (4, 40))
    found = []
    for least in (LEAST_ROWS, 10**9):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(products, "LEAST_ROWS", least)
            model.zero_grad()
            memory = model.encode(ids) if model.encoder else None
            states = model.decode(ids, memory=memory) if model.decoder else memory and memory.states_BSC
            assert isinstance(states, Tensor)
            loss = model.head.loss(states.flatten(0, 1), ids.flatten())
            loss.backward()
            taken, ahead[:] = len(ahead), []
            assert (taken > 0) == (least == LEAST_ROWS)
            found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("ahead")
def test_few_rows_other_numbers_and_mixed_precision_take_torchs_way() -> None:
    assert suits_onednn(torch.randn(LEAST_ROWS, 8))
    assert not suits_onednn(torch.randn(LEAST_ROWS - 1, 8))
    assert not suits_onednn(torch.randn(LEAST_ROWS, 8, dtype=torch.float64))
    assert not suits_onednn(torch.randn(LEAST_ROWS, 8).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert not suits_onednn(torch.randn(LEAST_ROWS, 8))
        assert Linear(8, 8)(torch.randn(LEAST_ROWS, 8)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("capability", "vendor", "ahead"),
    [("AVX512", "AuthenticAMD", True), ("AVX512", "GenuineIntel", False), ("AVX2", "AuthenticAMD", False)],
)
def test_it_is_taken_where_mkl_uses_half_of_the_processor(
    capability: str, vendor: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(products, "processor", lambda: f"vendor_id\t: {vendor}\n")
    products.onednn_is_ahead.cache_clear()
    assert products.onednn_is_ahead() == ahead
    products.onednn_is_ahead.cache_clear()
