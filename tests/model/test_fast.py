"""Our own kernels give what torch's slower ones give, values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model import fast
from pipeline.model.fast import RMSNorm, keep_freed_memory, squared_relu


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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_numbers_take_torchs_way(dtype: torch.dtype) -> None:
    x = torch.randn(3, 8).to(dtype)
    assert RMSNorm(8, 1e-6).to(dtype)(x).dtype == squared_relu(x).dtype == dtype


def test_memory_can_be_kept_on_any_system() -> None:
    keep_freed_memory()
    keep_freed_memory()
    assert len(torch.zeros(20_000_000)) == 20_000_000
