"""Fixtures of the attacks: a plugin that tries them, and a secret it was not given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Caller
from tests.escape.cage import ProbeCage, make_cage

SECRET = "canary-7f3a"


@pytest.fixture
def cage(runner_as: Caller, plugin_dir: Path, nothing_left: None) -> ProbeCage:
    return make_cage(runner_as, plugin_dir)


@pytest.fixture
def secret(runner_as: Caller, write_file: Callable[..., Path]) -> Path:
    """A file in the caller's home that only the caller may read."""
    path = write_file(runner_as.home / "private/secret", SECRET, 0o600)
    path.parent.chmod(0o700)
    runner_as.give(path.parent)
    return path
