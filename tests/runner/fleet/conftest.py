from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runner.fleet.bus import Bus, bus_in


@pytest.fixture(scope="session")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bus]:
    """One server with the streams, for tests whose users and plugins have names of their own."""
    with bus_in(Path(tmp_path_factory.mktemp("bus"))) as found:
        yield found
