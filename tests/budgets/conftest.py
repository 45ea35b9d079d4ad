"""A caller's box, in which nothing may be left: no process, no mount, no file, no cgroup."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.budgets.cage import Box
from tests.conftest import Caller


@pytest.fixture
def box(runner_as: Caller, plugin_dir: Path, nothing_left: None) -> Iterator[Box]:
    """Once as root, once as an ordinary user."""
    box = Box(runner_as, plugin_dir)
    yield box
    assert box.groups_left() == []
