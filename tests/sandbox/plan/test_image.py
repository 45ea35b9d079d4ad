"""The root of an image in a plan: with a layer in memory, without one, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sandbox.paths.denylist import Denylist
from sandbox.paths.executable import ProgramFault
from sandbox.paths.mounts import read_mounts
from sandbox.plan import bwrap, image
from sandbox.plan.plan import Bind, LaunchPlan, PlanOutdated, PlanRefused, ReadOnly, Symlink, Text, Tmpfs
from sandbox.plan.sources import judge_written
from sandbox.spec import ImageRoot
from tests.conftest import USER_UID
from tests.sandbox.cages import compiled, grant, granted, opened, request
from tests.tables import check_rows


@pytest.fixture
def root(plugin_dir: Path) -> ImageRoot:
    tree = plugin_dir / "tree"
    for folder in (
        "etc/ssl/certs",
        "bin",
        "usr/share/doc",
        "home",
        "proc",
        "dev",
        "sys",
        "tmp",
        "run",
        "work",
    ):
        (tree / folder).mkdir(parents=True)
    for name in ("etc/resolv.conf", "etc/hosts", "etc/nsswitch.conf", "etc/ssl/certs/ca-certificates.crt"):
        (tree / name).touch()
    (tree / "bin/tool").touch(0o755)
    os.symlink("/usr/share", tree / "opt")
    about = {"uid": 1000, "gid": 1001, "home": "/home/app", "env": (("PATH", "/bin"), ("A", "of the image"))}
    return ImageRoot("docker.io/x/y:1", tree=str(tree), directory="/work", **about)  # type: ignore[arg-type]


def plan_of(root: ImageRoot, *paths: str, **more: Any) -> LaunchPlan:
    shown = [granted(path) for path in paths]
    return compiled(request("tool", "-x", image=root), grant(shown, env={"A": "asked", "B": "1"}), **more)


def dests(plan: LaunchPlan, kind: type) -> list[str]:
    return [op.dest for op in plan.operations if isinstance(op, kind)]


@pytest.mark.launches  # the layer is tried in namespaces
def test_a_layer_takes_the_changes(root: ImageRoot, plugin_dir: Path) -> None:
    (plugin_dir / "shown").mkdir()
    plan = plan_of(root, str(plugin_dir / "shown"))
    assert plan.argv == ("/bin/tool", "-x") and plan.directory == "/work" and plan.inside == (1000, 1001)
    assert dict(plan.env) == {"PATH": "/bin", "HOME": "/home/app", "A": "asked", "B": "1"}
    [overlay] = plan.overlays
    assert overlay.dest == "/" and overlay.memory == plan.folders[-1].size
    first, *_ = plan.operations
    assert isinstance(first, Bind) and (first.dest, first.real, first.writable) == ("/", root.tree, False)
    # Of the host: what was asked for, and the certificates.
    assert not [dest for dest in dests(plan, Bind) if dest.startswith(("/usr", "/lib", "/bin"))]
    assert str(plugin_dir / "shown") in dests(plan, Bind) and ReadOnly("/") not in plan.operations
    assert dests(plan, Text) == ["/etc/hosts", "/etc/nsswitch.conf"]
    assert all(op.covers for op in plan.operations if isinstance(op, Text))
    words = bwrap.head(plan, inherits_network=True)
    assert words[words.index("--uid") + 1] == "1000" and words[words.index("--gid") + 1] == "1001"
    [note] = [each for each in plan.notes if each.rule == "image"]
    assert "in memory and ends with it" in note.message


def test_without_a_layer_the_root_is_read_only(
    root: ImageRoot, plugin_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders of the image are mounted one by one, as far down as something of the host needs a place."""
    monkeypatch.setattr(image, "_layer_fault", lambda *given: "the kernel says: no")
    (plugin_dir / "shown").mkdir()
    # One in the image's own folder, one that it does not have.
    moved = root._replace(places=((str(plugin_dir / "shown"), "/usr/share/new"),))
    plan = plan_of(moved, str(plugin_dir / "shown"))
    assert plan.overlays == () and plan.operations[-1] == ReadOnly("/")
    binds = dests(plan, Bind)
    assert {"/bin", "/etc", "/usr/share/doc", "/usr/share/new", "/work"} <= set(binds)
    assert not {"/", "/usr", "/usr/share", "/proc", "/dev", "/sys", "/tmp"}.intersection(binds)
    assert Symlink("/opt", "/usr/share") in plan.operations
    assert {"/tmp", "/run", "/var/tmp", "/home/app"} <= set(dests(plan, Tmpfs))
    [note] = [each for each in plan.notes if each.rule == "image"]
    assert "read-only but for /tmp, /run, /var/tmp, /home/app (the kernel says: no)" in note.message
    for name in range(500):
        (Path(root.tree) / f"usr/share/{name}").touch()
    with pytest.raises(PlanRefused, match=r"would take 5\d\d mounts"):
        plan_of(moved, str(plugin_dir / "shown"))


@pytest.mark.parametrize("layered", [True, False])
def test_places_that_nothing_of_the_host_can_have(
    root: ImageRoot, plugin_dir: Path, monkeypatch: pytest.MonkeyPatch, layered: bool
) -> None:
    if not layered:
        monkeypatch.setattr(image, "_layer_fault", lambda *given: "no")
    (plugin_dir / "shown").mkdir()
    (plugin_dir / "file").touch()
    folder, file = str(plugin_dir / "shown"), str(plugin_dir / "file")
    rows = {
        (folder, "/opt"): "in the image /opt is a link to /usr/share",
        (folder, "/opt/new"): "in the image /opt is a link to /usr/share",
        (folder, "/bin/tool"): "in the image /bin/tool is a file",
        (file, "/usr"): "in the image /usr is a folder",
        (folder, "/"): "the cage has files of its own there",
        (folder, "/proc/x"): "the cage has files of its own there",
        (folder, "/dev/shm"): "the cage has files of its own there",
        (file, "/etc/hosts"): "the cage has files of its own there",
        (folder, "/etc"): "the cage has files of its own there",
        (file, "/.authorities.pem"): "the cage has files of its own there",
        (folder, "/.ssh-agent/x"): "the cage has files of its own there",
    }

    def is_refused(row: tuple[str, str], said: str) -> None:
        with pytest.raises(PlanRefused) as refused:
            plan_of(root._replace(places=(row,)), row[0])
        assert said in str(refused.value)

    check_rows(rows.items(), is_refused)
    for in_memory in ("/work/new", "/work"):
        both = root._replace(places=((folder, "/work"),), folders=(in_memory,))
        with pytest.raises(PlanRefused, match=f"shown at {in_memory}: it is in a folder of the host"):
            plan_of(both, folder)
    # In a folder of the host nothing is made, and no link is followed.
    (plugin_dir / "shown/kept").mkdir()
    (plugin_dir / "shown/file").touch()
    os.symlink("kept", plugin_dir / "shown/link")
    nested = {
        "/work/missing": "missing is missing in it",
        "/work/link": "link is a link in it",
        "/work/link/x": "and link is a link in it",
        "/work/file": "file is a file in it",
        "/work/kept/x": "kept/x is missing in it",
    }
    (plugin_dir / "second").mkdir()
    second = str(plugin_dir / "second")

    def is_no_place(path: str, said: str) -> None:
        both = root._replace(places=((folder, "/work"), (second, path)))
        with pytest.raises(PlanRefused, match=said):
            plan_of(both, folder, second)

    check_rows(nested, is_no_place)
    inside = plan_of(root._replace(places=((folder, "/work"), (second, "/work/kept"))), folder, second)
    assert {"/work", "/work/kept"} <= set(dests(inside, Bind))
    # What the image has for authorities is the cage's too, but where a folder of the host is shown.
    shown = plan_of(root._replace(places=((folder, "/etc/ssl"),)), folder)
    assert not [dest for dest in dests(shown, Bind) if dest.startswith("/etc/ssl/")]


@pytest.mark.needs("root")
@pytest.mark.launches
def test_a_volume_that_is_written_has_an_owner(root: ImageRoot, plugin_dir: Path) -> None:
    """It has another path in the cage. Of a stored plan its owner is looked at again."""
    volume = plugin_dir / "volume"
    volume.mkdir()
    os.chown(volume, USER_UID, USER_UID)
    asked = request("tool", image=root._replace(places=((str(volume), "/data"),)))
    with opened(asked, grant([granted(str(volume), "write")])) as held:
        owners = held.plan.owners
        assert owners is not None and [(each.path, each.uid) for each in owners.paths] == [
            ("/data", USER_UID)
        ]
        assert [each.dest for each in held.plan.idmapped] == ["/data"] and "/data" in held.descriptors
        denylist = Denylist(read_mounts())
        judge_written(held, denylist, scan_limit=100)
        os.chown(volume, USER_UID + 1, USER_UID)
        with pytest.raises(PlanOutdated, match=str(volume)):
            judge_written(held, denylist, scan_limit=100)


@pytest.mark.launches  # the layer is tried in namespaces
def test_links_in_the_places_of_the_cages_own_files(root: ImageRoot, plugin_dir: Path) -> None:
    """Whatever the cage has of its own, a link of the image leads none of it elsewhere."""
    tree, home = Path(root.tree), plugin_dir / "home"
    state = str(plugin_dir / "state")
    os.mkdir(state)
    home.mkdir()

    def refused(**more: Any) -> str:
        wanted = [granted(state, "write")._replace(origin="state")] if more else []
        asked = request("tool", image=root._replace(home="/away/x"), **more)
        with pytest.raises(PlanRefused) as told:
            compiled(asked, grant(wanted))
        return str(told.value)

    os.symlink(home, tree / "away")
    # A name in the home of the image's user, which is wherever its own passwd says.
    assert f"in the image /away is a link to {home}" in refused(state_dir=state, state_link=".data/x")
    os.symlink(home, tree / ".authorities.pem")
    assert "the cage has /.authorities.pem" in refused()
    os.unlink(tree / ".authorities.pem")
    assert compiled(request("tool", image=root), grant([])).argv == ("/bin/tool",)


def test_the_program_is_one_of_the_image(root: ImageRoot) -> None:
    for command in ("cat", "/usr/bin/cat", "/etc/hosts", "tool/x"):
        with pytest.raises(ProgramFault, match=f"the image docker.io/x/y:1 has no program {command}"):
            compiled(request(command, image=root))
    assert compiled(request("/bin/tool", image=root)).argv == ("/bin/tool",)
    assert compiled(request("../bin/tool", image=root)).argv == ("/bin/tool",)
    with pytest.raises(ProgramFault, match="was removed while it was looked at"):
        compiled(request("tool", image=root._replace(tree=root.tree + "-gone")))
    with pytest.raises(ProgramFault, match="another image than the one that was allowed"):
        compiled(request("tool", image=root, approved_program=("/other/tree",)))
    with pytest.raises(PlanRefused, match="has no folder /opt/missing to start in"):
        compiled(request("tool", image=root._replace(directory="/opt/missing")))
    # One that can be made is made, as docker does it.
    made = compiled(request("tool", image=root._replace(directory="/missing")))
    assert made.directory == "/missing" and "/missing" in dests(made, Tmpfs)
