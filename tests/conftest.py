"""What holds for all tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def whole_numbers() -> Iterator[None]:
    """Training rounds the tiniest numbers to zero, in the whole process; the next test wants them back."""
    yield
    torch.set_flush_denormal(False)
