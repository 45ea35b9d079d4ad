"""What is guarded in a writable folder, when the plan is made and when a stored one is opened again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandbox.paths.denylist import Denylist
from sandbox.paths.guarded import MOST_NESTED, MOST_PROJECTS, GuardedName
from sandbox.paths.mounts import read_mounts
from sandbox.paths.scan import SourceRefused
from sandbox.paths.source import open_source
from sandbox.plan.guards import guard_notes, guards_of, shown_guards
from sandbox.plan.plan import Guard, PlanRefused

NAMES = (
    GuardedName(".mcp.json", "a host", "{}\n"),
    GuardedName(".vscode", "an editor"),
    GuardedName("*.code-workspace", "an editor", None, True),
    GuardedName(".github", "a host", sign="", parts=(GuardedName("mcp.json", "a host", "{}\n"),)),
)


def guards(place: Path, conceal: tuple[str, ...] = (), deciding: tuple[str, ...] = ()) -> tuple[Guard, ...]:
    denylist = Denylist(read_mounts(), guarded=NAMES, deciding=deciding)
    source = open_source(str(place), access="write", denylist=denylist)
    try:
        return guards_of("/inside", source, denylist, conceal)
    finally:
        source.close()


def refusal(place: Path) -> str:
    with pytest.raises((PlanRefused, SourceRefused)) as refused:
        guards(place)
    return str(refused.value)


def test_nothing_is_there(tmp_path: Path) -> None:
    found = guards(tmp_path)
    assert found == (
        Guard("/inside", ".git", "read", "made at launch"),
        Guard("/inside", ".hg", "read", "made at launch"),
        Guard("/inside", ".mcp.json", "read", "made at launch", "{}\n"),
        Guard("/inside", ".vscode", "read", "made at launch"),
        Guard("/inside", "commondir", "read", "made at launch"),
        Guard("/inside", "refs", "read", "made at launch", ""),
    )
    assert list(shown_guards(found)) == []
    (note,) = guard_notes(found)
    names = ".git, .hg, .mcp.json, .vscode, commondir, refs"
    assert note.message.startswith(f"in /inside the plugin cannot make {names}: ")


def test_a_repository_stays_writable_but_for_what_is_run(tmp_path: Path) -> None:
    (tmp_path / ".git/hooks").mkdir(parents=True)
    (tmp_path / ".git/HEAD").touch()
    (tmp_path / ".git/config").touch()
    found = {guard.path: (guard.access, guard.state) for guard in guards(tmp_path)}
    assert found[".git"] == ("write", "bound")
    assert found[".git/hooks"] == found[".git/config"] == ("read", "bound")
    assert found[".git/commondir"] == found[".git/modules"] == ("read", "made at launch")


def test_further_down_what_exists_is_guarded_with_all_on_the_way(tmp_path: Path) -> None:
    for name in ("a/b/.vscode", "a/node_modules/x/.vscode", ".vscode/.vscode", "c/.git/hooks"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "c/.git/HEAD").touch()
    found = {guard.path: guard.access for guard in guards(tmp_path) if guard.state == "optional"}
    ways = {"a", "a/b", "c", "c/.git"}
    assert found == {"a/b/.vscode": "read"} | dict.fromkeys(ways, "write")
    states = {guard.path: guard.state for guard in guards(tmp_path) if guard.path.startswith("c/.git/")}
    parts = ("config", "config.worktree", "commondir", "modules", "worktrees", "remotes", "branches")
    assert states == {"c/.git/hooks": "bound"} | {f"c/.git/{part}": "made at launch" for part in parts}


def test_projects_directly_below_are_guarded_like_the_top(tmp_path: Path) -> None:
    """`--write ~/work`, with projects in it: also what they do not have yet."""
    for name in ("a/.git", "b/.vscode", "c/deep/.vscode", "d", "node_modules/x/.vscode"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "a/.git/HEAD").touch()
    (tmp_path / "b/.mcp.json").symlink_to("/etc/hostname")
    (tmp_path / "b/x.code-workspace").touch()
    found = {guard.path: guard.state for guard in guards(tmp_path) if guard.access == "read"}
    made = {path for path, state in found.items() if state == "made at launch" and "/" in path}
    tops = {".hg", ".mcp.json", ".vscode", "commondir", "refs"}
    assert {path for path in made if not path.startswith("a/.git/")} == {
        *(f"a/{name}" for name in tops),
        *("b/.git", "b/.hg", "b/commondir", "b/refs"),
    }
    assert found["b/.vscode"] == found["b/x.code-workspace"] == found["c/deep/.vscode"] == "optional"
    assert found["b/.mcp.json"] == "link"  # the plugin can replace it, and then it is named
    assert "nor such names in a, b" in next(guard_notes(guards(tmp_path))).message
    for number in range(MOST_PROJECTS - 1):
        (tmp_path / f"more{number}/.vscode").mkdir(parents=True)
    made = {guard.path for guard in guards(tmp_path) if guard.state == "made at launch"}
    assert "a/.git/config" in made and not any(path.startswith(("a/.vscode", "b/")) for path in made)
    first, second = guard_notes(guards(tmp_path))
    assert "nor such names" not in first.message and f"holds {MOST_PROJECTS + 1} projects" in second.message


def test_only_parts_of_some_folders(tmp_path: Path) -> None:
    (tmp_path / ".github/workflows").mkdir(parents=True)
    (tmp_path / ".hg").mkdir()
    (tmp_path / ".hg/requires").touch()
    (tmp_path / "x.code-workspace").touch()
    found = {guard.path: (guard.access, guard.state) for guard in guards(tmp_path)}
    assert found[".github"][0] == found[".hg"][0] == "write"
    assert found[".github/mcp.json"] == found[".hg/hgrc"] == ("read", "made at launch")
    assert found[".hg/requires"] == ("read", "bound") and found["x.code-workspace"] == ("read", "optional")


def test_the_own_configuration_is_hidden_and_no_reason_to_refuse(tmp_path: Path) -> None:
    file = tmp_path / ".mcp.json"
    file.write_text("{}")
    found = {guard.path: guard.access for guard in guards(tmp_path, (str(file),), (str(file),))}
    assert found[".mcp.json"] == "hidden"
    with pytest.raises(SourceRefused, match="decides what a plugin may do"):
        guards(tmp_path, (), (str(tmp_path / "plugin.toml"),))


@contextmanager
def _changed(path: Path) -> Iterator[None]:
    yield
    path.unlink()


def test_what_cannot_be_guarded_is_refused(tmp_path: Path) -> None:
    with _changed(tmp_path / ".vscode"):
        (tmp_path / ".vscode").symlink_to("elsewhere")
        assert "is a symbolic link" in refusal(tmp_path)
    (tmp_path / ".mcp.json").touch()
    with _changed(tmp_path / "other"):
        os.link(tmp_path / ".mcp.json", tmp_path / "other")
        assert "has another hard link" in refusal(tmp_path)
    for number in range(MOST_NESTED + 1):
        assert guards(tmp_path)
        (tmp_path / f"{number}/.vscode").mkdir(parents=True)
    assert f"at most {MOST_NESTED} can be guarded" in refusal(tmp_path)
    (tmp_path / ".vscode/x").mkdir(parents=True)
    assert "the configuration of a host or of git" in refusal(tmp_path / ".vscode/x")


def test_objects_that_a_local_clone_shares_are_no_reason_to_refuse(tmp_path: Path) -> None:
    place = tmp_path / "clone"
    (place / ".git/objects").mkdir(parents=True)
    (place / ".git/HEAD").touch()
    (tmp_path / "object").touch()
    os.link(tmp_path / "object", place / ".git/objects/object")
    assert guards(place)
    os.link(tmp_path / "object", place / ".git/config")
    assert "has another hard link" in refusal(place)


@pytest.mark.parametrize(
    ("target", "refused"),
    [
        ("../by", True),  # a link that the plugin could replace, and that leads out
        ("../sub/../../outside", True),  # so is a folder on the way
        ("..", True),
        ("../..", True),
        ("../sub/.mcp.json", True),  # missing further down: it could be made
        ("../../outside", False),
        ("tasks.json", False),  # a circle
        ("../circle", True),  # one that the plugin could break
    ],
)
def test_every_step_of_a_link_counts(tmp_path: Path, target: str, refused: bool) -> None:
    place = tmp_path / "place"
    (place / ".vscode").mkdir(parents=True)
    (place / "sub").mkdir()
    (place / "by").symlink_to(tmp_path / "outside")
    (place / "circle").symlink_to("circle")
    (place / ".vscode/tasks.json").symlink_to(target)
    if refused:
        assert f"{place}/.vscode/tasks.json is a symbolic link" in refusal(place)
    else:
        assert guards(place)


def test_a_link_into_another_writable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "place/.vscode").mkdir(parents=True)
    (tmp_path / "place/.vscode/tasks.json").symlink_to(tmp_path / "other/x")
    denylist = Denylist(read_mounts(), guarded=NAMES)
    source = open_source(str(tmp_path / "place"), access="write", denylist=denylist)
    try:
        assert guards_of("/inside", source, denylist)
        with pytest.raises(PlanRefused, match="is a symbolic link"):
            guards_of("/inside", source, denylist, written=[str(tmp_path / "other")])
    finally:
        source.close()
