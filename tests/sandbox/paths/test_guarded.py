"""Which paths have a guarded name, and what lies on the way to them."""

from __future__ import annotations

import pytest

from sandbox.paths.guarded import is_guarded, is_guarded_at_top, parent_folders

NAMES = frozenset({".vscode", ".mcp.json"})


@pytest.mark.parametrize(
    ("path", "anywhere", "at_top"),
    [
        (".mcp.json", True, True),
        (".vscode/a/b", True, True),
        ("a/.vscode", True, False),
        (".vscodes", False, False),
        ("a/.mcp.json.bak", False, False),
        (".git/hooks/x", True, True),
        (".git/config", True, True),
        (".git/commondir", True, True),
        (".git/objects/ab", False, False),
        (".git/objects/.vscode", False, False),
        ("a/.git", True, False),
        ("node_modules/x/.vscode", False, False),
        ("", False, False),
    ],
)
def test_names(path: str, anywhere: bool, at_top: bool) -> None:
    assert (is_guarded(path, NAMES), is_guarded_at_top(path, NAMES)) == (anywhere, at_top)


def test_ways_are_all_folders_above_outermost_first() -> None:
    assert list(parent_folders([".mcp.json", ".git/hooks", "a/b/.vscode"])) == [".git", "a", "a/b"]
