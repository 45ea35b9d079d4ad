"""Places that only the cage has never meet a path of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sandbox.plan.bare import bare_command, command_line
from sandbox.plan.places import state_link
from sandbox.plan.plan import Bind, PlanRefused, ReadOnly, Symlink, Tmpfs
from sandbox.spec import DEFAULT_SCRATCH_BYTES, Grant, Limits, MemoryFile, Scratch
from tests.sandbox import cages

KEY = MemoryFile("/box/secrets/key", secret="key")


def grant(*, paths: Any = (), **changes: Any) -> Grant:
    limits = changes.pop("limits", Limits())
    return cages.grant(paths, limits=limits)._replace(**changes)


def compiled(given: Grant, **changes: Any) -> Any:
    return cages.compiled(cages.request("/bin/true", **changes), given)


def test_a_scratch_folder_and_memory_files() -> None:
    inner = MemoryFile("/box/scratch/1/big", 0o400)
    plan = compiled(grant(scratch=Scratch("/box/scratch/1"), memory_files=(KEY, inner)))
    scratch = next(op for op in plan.operations if isinstance(op, Tmpfs) and op.dest == "/box/scratch/1")
    assert (scratch.size, scratch.mode) == (DEFAULT_SCRATCH_BYTES, 0o700) and scratch.inodes == 16384
    order = plan.operations
    assert order.index(scratch) < order.index(inner) < order.index(ReadOnly("/"))
    assert plan.memory_files == (KEY, inner)
    line = command_line(bare_command(plan, "bwrap", "/filter"))
    assert "--perms 0400 --file" in line and "<key" in line


def test_its_size_is_the_disk_limit() -> None:
    plan = compiled(grant(scratch=Scratch("/box/scratch"), limits=Limits(disk=1 << 20)))
    [scratch] = [op for op in plan.operations if isinstance(op, Tmpfs) and op.dest == "/box/scratch"]
    assert (scratch.size, scratch.inodes) == (1 << 20, 1024)


def test_variables_may_name_such_places() -> None:
    env = (("KEYS", "/box/secrets"), ("OUT", "/box/scratch"), ("KEY", "/box/secrets/key"))
    assert compiled(grant(scratch=Scratch("/box/scratch"), memory_files=(KEY,), env=env)).notes == ()


@pytest.mark.parametrize(
    "dest",
    ["/", "/tmp/x", "/usr/x", "/etc", "/proc/x", "/dev/shm", "/bin", "relative", "/box/../etc/x", "/box//x"],
)
@pytest.mark.parametrize("kind", ["scratch", "file", "root"])
def test_places_that_every_cage_has(dest: str, kind: str, plugin_dir: Path) -> None:
    given, changes = grant(), {}
    if kind == "scratch":
        given = grant(scratch=Scratch(dest))
    elif kind == "file":
        given = grant(memory_files=(MemoryFile(dest),))
    else:
        changes = {"directory": str(plugin_dir), "root_inside": dest}
    with pytest.raises(PlanRefused) as refused:
        compiled(given, **changes)
    assert {denial.rule for denial in refused.value.denials} == {"cage_place"}


@pytest.mark.parametrize("dest", ["/tmp/x", "/usr/lib/x", "/opt/x"])
def test_a_copy_of_a_folder_is_where_the_folder_would_be(dest: str, plugin_dir: Path) -> None:
    changes = {"directory": str(plugin_dir), "root_inside": dest, "root_is_copy": True}
    plan = compiled(grant(), **changes)
    assert [op.real for op in plan.operations if isinstance(op, Bind) and op.dest == dest] == [
        str(plugin_dir)
    ]
    with pytest.raises(PlanRefused):  # what only the cage has is still apart from it
        compiled(grant(memory_files=(MemoryFile(f"{dest}/key"),)), **changes)


@pytest.mark.parametrize("access", ["read", "write"])
def test_a_host_path_at_such_a_place(plugin_dir: Path, access: Any) -> None:
    """A memory file would be written into the folder of the host."""
    inside = str(plugin_dir)
    for own in (
        {"memory_files": (MemoryFile(f"{inside}/key"),)},
        {"scratch": Scratch(f"{inside}/scratch")},
        {"scratch": Scratch(str(plugin_dir.parent))},
    ):
        with pytest.raises(PlanRefused) as refused:
            compiled(grant(paths=[cages.granted(inside, access)], **own))
        assert any(denial.rule == "cage_place" for denial in refused.value.denials)


@pytest.mark.parametrize(
    "own",
    [
        {"memory_files": (KEY, KEY)},
        {"memory_files": (KEY, MemoryFile("/box/secrets/key/below"))},
        {"memory_files": (MemoryFile("/box"),), "scratch": Scratch("/box/scratch")},
        {"memory_files": (MemoryFile("/box/package/key"),)},
        {"scratch": Scratch("/box/package/scratch")},
        {"scratch": Scratch("/box")},
    ],
)
def test_places_in_each_other(plugin_dir: Path, own: dict[str, Any]) -> None:
    (plugin_dir / "part").mkdir()
    with pytest.raises(PlanRefused) as refused:
        compiled(grant(**own), directory=str(plugin_dir), root_inside="/box/package")
    assert {denial.rule for denial in refused.value.denials} == {"cage_place"}


@pytest.mark.parametrize(
    ("home", "shown", "linked"),
    [
        ("/tmp", (), True),
        ("/home/me", ("/home/me/.box/logs",), True),
        ("/home/me/", (), True),
        ("/", (), True),
        *(("/home/me", (f"/home/me{path}",), False) for path in ("", "/.box/data", "/.box/data/x")),
        *((home, (), False) for home in ("relative", "/a/../b", "/usr/x", "/proc", "/etc/x", "/dev/shm")),
    ],
)
def test_a_name_of_the_state_directory_below_home(home: str, shown: tuple[str, ...], linked: bool) -> None:
    """It is never where something is mounted: bwrap would follow it."""
    request = cages.request("/bin/true", state_dir="/state/x", state_link=".box/data")
    links, notes = state_link(request, home, ["/state/x", "/usr", *shown], ())
    assert links == ([Symlink(f"{home.rstrip('/')}/.box/data", "/state/x")] if linked else [])
    assert [note.rule for note in notes] == ([] if linked else ["state"])
    at_once = state_link(request._replace(state_dir="/tmp/.box/data"), "/tmp", ["/tmp/.box/data"], ())
    assert at_once == ([], [])
    link = Symlink("/home/me/.box", "/elsewhere")
    assert not state_link(request, "/home/me", ["/state/x"], [link])[0]
