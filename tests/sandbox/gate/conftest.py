from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.sandbox.gate.netlab import Lab


@pytest.fixture(autouse=True)
def _no_loop_is_left_to_another_test() -> Iterator[None]:
    """A loop and its handlers hold each other. Its descriptors are closed here, and not within a test that
    counts descriptors."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def built_lab() -> Iterator[Lab]:
    lab = Lab()
    yield lab
    lab.close()


@pytest.fixture
def lab(built_lab: Lab) -> Lab:
    built_lab.names.reset()
    return built_lab
