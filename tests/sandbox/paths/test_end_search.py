"""What the search after a plugin's end finds in its writable folders, and where it stops."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.document.diagnostic import printable
from sandbox.paths import end_search
from sandbox.paths.end_search import Findings, FolderSearch, WatchedFolder, findings_document, read_findings
from sandbox.paths.guarded import GuardedName, guarded_table
from sandbox.paths.stand_in import GuardedPlace, hold_places
from tests.tables import one_case

NAMES = guarded_table(
    (
        GuardedName(".mcp.json", "a host", "{}\n"),
        GuardedName(".vscode", "an editor"),
        GuardedName("*.code-workspace", "an editor", None, True),
        GuardedName(".github", "a host", sign="", parts=(GuardedName("hooks", "a host"),)),
    )
)
_MARK = 1_003_715_428_918_273_700  # of a stand-in


def search(place: Path, change: Callable[[], object], *guarded: str) -> Findings:
    """Search after `change`. `guarded`: what exists before it."""
    folder = FolderSearch(NAMES)
    fd = os.open(place, os.O_PATH | os.O_DIRECTORY)
    try:
        with folder.watching([WatchedFolder(str(place), fd, guarded, guarded)]):
            folder.started = True
            change()
            folder.search()
    finally:
        os.close(fd)
    assert folder.findings is not None
    assert read_findings(findings_document(folder.findings, str)) == folder.findings
    return folder.findings


def make(place: Path, *names: str) -> None:
    """Make files, folders (`x/`) and links (`x -> y`)."""
    for name in names:
        path, _, target = name.partition(" -> ")
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        if target:
            (place / path).symlink_to(target)
        elif name.endswith("/"):
            (place / path).mkdir(exist_ok=True)
        else:
            (place / path).touch()


@one_case(
    ("made", "found"),
    [
        (("src/x", "src/y/Makefile", "package.json", "HEAD", "objects/", ".github/workflows/x"), ()),
        (("src/.git/HEAD", "src/.git/config"), ("src/.git/config",)),
        (("src/.git/HEAD",), ("src/.git",)),
        (("src/.git",), ("src/.git",)),
        (("src/.GIT",), ("src/.GIT",)),
        (("src/.git -> ../x",), ("src/.git",)),
        (("src/.git/config -> x",), ("src/.git/config",)),
        (("src/.hg/hgrc", "src/.hg/requires"), ("src/.hg/hgrc", "src/.hg/requires")),
        (("a/b/HEAD", "a/b/objects/", "a/b/refs/"), ("a/b",)),
        (("HEAD -> x", "objects -> y", "refs -> z", "hooks/", "config"), ("config", "hooks")),
        (("a/.vscode/tasks.json", "a/.mcp.json"), ("a/.mcp.json", "a/.vscode")),
        (("a/x.code-workspace", "a/.code-workspace"), ("a/x.code-workspace",)),
        (("a/.github/hooks/x", "a/.github/y/.vscode/"), ("a/.github/hooks", "a/.github/y/.vscode")),
        (("a/b/HEAD", "a/b/commondir"), ("a/b/commondir",)),
        (("a/b/commondir", "a/b/refs/", "a/b/objects/"), ()),
        # git can be made to look into these: they need not be seen by a person.
        (("node_modules/x/.git/config",), ("node_modules/x/.git/config",)),
        (("node_modules/x/y/HEAD", "node_modules/x/y/commondir"), ("node_modules/x/y/commondir",)),
        (("a/.git/x/y/.git/config",), ("a/.git", "a/.git/x/y/.git/config")),
        (("node_modules/x/.vscode/", "node_modules/x/.husky/", "node_modules/x/y.code-workspace"), ()),
        (("link -> /",), ()),
    ],
)
def test_new_files_are_found(tmp_path: Path, made: tuple[str, ...], found: tuple[str, ...]) -> None:
    told = search(tmp_path, lambda: make(tmp_path, *made))
    assert sorted(each.path for each in told.changed) == [f"{tmp_path}/{name}" for name in found]
    assert not told.incomplete and told.entries > 0


def test_what_was_there_is_known_by_its_inode(tmp_path: Path) -> None:
    make(tmp_path, ".mcp.json", ".vscode/x", "a/.git/config", "a/.git/hooks/", "b/.mcp.json -> /x")
    make(tmp_path, *(f"a/.git/{name}" for name in ("HEAD", "objects/", "refs/", "modules/x/.git/config")))
    known = (".mcp.json", ".vscode", "a/.git/config", "a/.git/hooks", "a/.git/modules", "b/.mcp.json")
    assert search(tmp_path, lambda: make(tmp_path, ".vscode/y"), *known).changed == ()

    def replace() -> None:
        for name in (".mcp.json", "a/.git/config", "b/.mcp.json"):
            (tmp_path / name).unlink()
            make(tmp_path, name)  # a number that is free is used again
        make(tmp_path, "a/.git/rebase-merge/x")

    told = search(tmp_path, replace, *known)
    assert {(each.path.removeprefix(f"{tmp_path}/"), each.obeyed_by) for each in told.changed} == {
        (".mcp.json", "a host"),
        ("b/.mcp.json", "a host"),
        ("a/.git/config", "git"),
        ("a/.git/rebase-merge", "git rebase --continue"),
    }


def test_stand_ins_of_others_are_nothing_new_and_forged_ones_are(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    others = [GuardedPlace(root, "a/.vscode"), GuardedPlace(root, "a/.mcp.json", "{}\n")]
    with hold_places([*others, GuardedPlace(root, "a/.git")]):
        assert search(tmp_path, lambda: None).changed == ()
    os.close(root)

    def forge() -> None:
        make(tmp_path, "a/.vscode/tasks.json", "a/.git/config")
        (tmp_path / "a/.mcp.json").write_text('{"x": 1}')
        for name in (".vscode", ".mcp.json", ".git"):
            os.utime(tmp_path / "a" / name, ns=(_MARK, _MARK))

    assert len(search(tmp_path, forge).changed) == 3


def test_nothing_is_searched_if_nothing_ran(tmp_path: Path) -> None:
    folder = FolderSearch(NAMES)
    fd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    with folder.watching([WatchedFolder(str(tmp_path), fd, ())]):
        make(tmp_path, "a/.git")
        folder.search()
    os.close(fd)
    assert folder.findings is None


@one_case(
    ("bound", "value", "told"),
    [
        ("MOST_ENTRIES", 12, "the search ended after 12 entries"),
        ("_DEPTH_LIMIT", 1, "is more than 1 folders deep"),
        ("_MOST_WAITING", 2, "there are more than 2 folders"),
        ("_SECONDS", -1.0, "the search ended after -1 seconds"),
    ],
)
def test_every_bound_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: float, told: str
) -> None:
    make(tmp_path, *(f"{number}/deep/x" for number in range(4)), ".vscode/")
    assert not search(tmp_path, lambda: None).incomplete  # the control: 13 entries, 9 folders
    monkeypatch.setattr(end_search, bound, value)
    found = search(tmp_path, lambda: None)
    assert told in found.incomplete and told in "\n".join(found.lines())
    assert [each.path for each in found.changed] == [f"{tmp_path}/.vscode"]  # near the top comes first


def test_a_long_path_is_cut(tmp_path: Path) -> None:
    make(tmp_path, "/".join(["x" * 200] * 10) + "/.git")
    (found,) = search(tmp_path, lambda: None).changed
    assert len(found.path) == 1001 and found.path.endswith("x…")


def test_what_is_told_is_bounded_and_printable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_search, "MOST_FINDINGS", 2)
    make(tmp_path, "\x1b[31mred/.git", "\udcff/.git", "deep/deep/.git")  # what is deeper comes last
    found = search(tmp_path, lambda: None)
    assert (len(found.changed), found.more) == (2, 1)
    paths = sorted(each["path"] for each in findings_document(found, printable)["changed"])
    assert paths == [f"{tmp_path}/\\udcff/.git", f"{tmp_path}/\\x1b[31mred/.git"]
    assert "1 more of such files" in "\n".join(found.lines())
