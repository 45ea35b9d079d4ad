"""What a person is told before an update counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from runner.contracts.mcp.verb_install import _differences
from runner.install.store import Lock, Locked


def test_an_archive_that_was_swapped_is_told_beside_a_new_version() -> None:
    """A registry could hide it behind the harmless update of another package."""
    old = (Locked("good", "1.0.0", "sha512-a"), Locked("swapped", "2.0.0", "sha512-b"))
    store: Any = SimpleNamespace(lock_of=lambda name: Lock("npm", "node", old))
    installed: Any = SimpleNamespace(set_name="x")
    good, swapped = Locked("good", "1.1.0", "sha512-c"), Locked("swapped", "2.0.0", "sha512-evil")
    told = ["good: 1.0.0 -> 1.1.0", "swapped: still 2.0.0, but the registry gives another archive"]
    assert _differences(store, installed, (good, swapped)) == told
    assert _differences(store, installed, (good, old[1])) == told[:1]  # the control: it is not swapped
    assert _differences(store, installed, (old[0], swapped)) == told[1:]
    added = _differences(store, installed, (*old, Locked("new\x1b[2J", "3", "sha512-d")))
    assert added == ["new\\x1b[2J: none -> 3"]
