from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sandbox.gate.netlab import Lab


@pytest.fixture(scope="session")
def built_lab() -> Iterator[Lab]:
    lab = Lab()
    yield lab
    lab.close()


@pytest.fixture
def lab(built_lab: Lab) -> Lab:
    built_lab.names.reset()
    return built_lab
