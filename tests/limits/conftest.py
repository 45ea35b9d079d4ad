"""The fixture `box`: runs plugins as one caller and fails if a process or a cgroup is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Caller
from tests.limits.cage import Box


@pytest.fixture
def box(runner_as: Caller, plugin_dir: Path, nothing_left: None) -> Iterator[Box]:
    """Once as root, once as an ordinary user."""
    box = Box(runner_as, plugin_dir)
    yield box
    assert box.groups_left() == []
