"""Every kernel set that the processor has, and the one in use put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moonclipfs import _codec
from tests.codec.samples import KERNELS


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """One kernel set, in use for the test."""
    before = _codec.kernel()
    try:
        _codec.use_kernel(request.param)
    except Exception as error:
        pytest.skip(str(error))
    yield request.param
    _codec.use_kernel(before)
