"""What holds for all tests."""

from collections.abc import Iterator

import pytest
import torch


def pytest_runtest_setup() -> None:
    """Training rounds the tiniest numbers to zero, in the whole process; the next test wants them back."""
    torch.set_flush_denormal(False)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Token stores of the tests stay with the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIPTYCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
