"""Which paths have a guarded name, and what lies on the way to them."""

from __future__ import annotations

from stat import S_IFDIR, S_IFLNK, S_IFREG

import pytest

from sandbox.paths.guarded import (
    GuardedName,
    guarded_table,
    is_guarded,
    is_guarded_at_top,
    missing_signs,
    parent_folders,
)

NAMES = guarded_table(
    (
        GuardedName(".vscode", "an editor"),
        GuardedName(".mcp.json", "a host", "{}"),
        GuardedName("*.code-workspace", "an editor", None, True),
        GuardedName(".github", "a host", sign="", parts=(GuardedName("mcp.json", "a host", "{}"),)),
    )
)


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
        (".git/rebase-merge/git-rebase-todo", True, True),
        (".hg/hgrc", True, True),
        (".hg/store/x", False, False),
        ("a/x.code-workspace", True, False),
        (".code-workspace", False, False),
        (".github", False, False),
        (".github/workflows/x.yml", False, False),
        (".github/mcp.json", True, True),
        (".github/a/.vscode", True, False),
        ("node_modules/x/.vscode", False, False),
        ("", False, False),
    ],
)
def test_names(path: str, anywhere: bool, at_top: bool) -> None:
    assert (is_guarded(path, NAMES), is_guarded_at_top(path, NAMES)) == (anywhere, at_top)


def test_ways_are_all_folders_above_outermost_first() -> None:
    assert list(parent_folders([".mcp.json", ".git/hooks", "a/b/.vscode"])) == [".git", "a", "a/b"]


@pytest.mark.parametrize(
    ("there", "guarded"),
    [
        ({}, ["refs", "commondir"]),
        ({"HEAD": S_IFREG, "objects": S_IFDIR}, ["refs", "commondir"]),
        ({"refs": S_IFDIR}, ["objects", "commondir"]),
        ({"refs": S_IFREG | 0o644}, ["refs", "commondir"]),  # of another launch
        ({"refs": S_IFREG | 0o755}, ["objects", "commondir"]),  # git could execute it, which is what it asks
        ({"refs": S_IFLNK, "objects": S_IFDIR}, ["HEAD"]),
        ({"refs": S_IFDIR, "objects": S_IFDIR, "HEAD": S_IFDIR}, ["HEAD"]),
        ({"refs": S_IFDIR, "objects": S_IFDIR, "HEAD": S_IFREG}, []),
    ],
)
def test_one_sign_of_a_bare_repository_is_guarded(there: dict[str, int], guarded: list[str]) -> None:
    """And the file that can say that it lies elsewhere."""
    assert [each.path for each in missing_signs(there.get)] == guarded
