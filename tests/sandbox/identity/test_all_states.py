"""Listing and removing states, while plugins start and others write beside them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox.identity import all_states
from sandbox.identity.all_states import State, StateNotRemoved, list_states, remove_state
from sandbox.identity.host_side import host_side
from sandbox.identity.state import RECORDS, owned_state
from tests import elsewhere
from tests.conftest import SPARE_UID, Caller

RANGE = (SPARE_UID + 24, SPARE_UID + 31)

needs_root = pytest.mark.needs("root")


def make_state(path: Path) -> State:
    """A state with a reserved uid, a file, and a host side with a file."""
    with owned_state(str(path), RANGE, manifest="/gone/plugin.toml") as owner:
        (path / "file").touch()
    Path(host_side(str(path))).mkdir(parents=True)
    (path.parent / ".storage").chmod(0o700)
    Path(host_side(str(path))).chmod(0o700)
    (Path(host_side(str(path))) / "kept").touch()
    return State(str(path), str(path), owner.uid, "/gone/plugin.toml", False)


def test_a_state_that_vanishes_while_all_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()

    def vanish(path: str) -> tuple[str, bool]:
        if path.endswith("/one"):
            os.rmdir(path)
        return real(path)

    def listed() -> set[str]:
        """Of this test's: states that root's plugins have elsewhere are listed too, and come and go."""
        return {Path(each.path).name for each in list_states({}) if Path(each.path).parent == tmp_path}

    real = vars(all_states)["_read_record"]
    monkeypatch.setattr(all_states, "state_root", lambda _: str(tmp_path))
    assert listed() == {"one", "two"}  # the control
    monkeypatch.setattr(all_states, "_read_record", vanish)
    assert listed() == {"two"}


@needs_root
def test_removing_follows_no_link_beside_the_state(plugin_dir: Path) -> None:
    """Somebody else may write to the folder that the state is in."""
    victim, state = plugin_dir / "victim", make_state(plugin_dir / "state")
    victim.mkdir()
    (victim / "state").mkdir()
    (plugin_dir / ".storage").rename(plugin_dir / "old")
    (plugin_dir / ".storage").symlink_to(victim)
    (plugin_dir / RECORDS).symlink_to(plugin_dir / "records")
    (plugin_dir / "records").mkdir()
    (plugin_dir / "records/state").touch()
    remove_state(state)
    assert not Path(state.path).exists()
    assert os.listdir(victim) == os.listdir(plugin_dir / "records") == ["state"]


@needs_root
def test_a_state_that_was_replaced_keeps_its_host_side(plugin_dir: Path) -> None:
    """It was removed and made again since it was listed, and its new uid is not locked."""
    state = make_state(plugin_dir / "state")
    kept = Path(host_side(state.path), "kept")
    os.chown(state.path, state.uid + 1, -1)
    with pytest.raises(StateNotRemoved, match="replaced meanwhile"):
        remove_state(state)
    assert kept.exists() and Path(state.path, "file").exists()
    os.chown(state.path, state.uid, -1)
    remove_state(state)  # the control
    assert not kept.exists() and not Path(state.path).exists()


def remove_with_a_mount(state: list[object], point: str, source: str) -> list[str]:
    """In mounts of its own."""
    import ctypes
    import os

    from sandbox.identity.all_states import State, StateNotRemoved, remove_state

    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x20000) == 0
    assert libc.mount(None, b"/", None, 0x4000 | 0x40000, None) == 0  # private
    os.makedirs(point, exist_ok=True)
    assert libc.mount(source.encode(), point.encode(), None, 0x1000, None) == 0
    try:
        remove_state(State(*state))  # type: ignore[arg-type]
        return ["removed"]
    except StateNotRemoved as kept:
        return [str(kept)]


@needs_root
@pytest.mark.parametrize("where", ["", "/data/below"])
def test_what_is_mounted_in_a_state_is_not_removed(
    plugin_dir: Path, runner_as_root: Caller, where: str
) -> None:
    state = make_state(plugin_dir / "state")
    point, precious = state.path + where, plugin_dir / "source/precious"
    precious.parent.mkdir()
    precious.touch()
    said = elsewhere.run(runner_as_root, remove_with_a_mount, list(state), point, str(precious.parent))
    assert said == [f"{point} is a mount point: unmount it, and try again"]
    assert precious.exists()
    assert Path(host_side(state.path), "kept").exists() and Path(state.path, "file").exists()
    remove_state(state)  # the control: nothing is mounted here
    assert not Path(state.path).exists()


def remove_while_it_starts() -> list[str]:
    """A launch has made the directory of a state, and goes on while the state is removed."""
    import os
    from typing import Any

    from sandbox.identity import all_states
    from sandbox.identity.state import StateRefused, owned_state, state_root

    said = []

    def start() -> None:
        try:
            with owned_state(path, None, manifest="/a/plugin.toml"):
                said.append("started")
        except StateRefused as refused:
            said.append(str(refused).replace(path, "PATH"))

    def remove_tree(*args: Any) -> None:
        start()
        real(*args)

    path = f"{all_states._root(os.environ)}/starting"
    os.makedirs(path, 0o700)
    assert state_root(os.environ) == os.path.dirname(path)
    real = vars(all_states)["remove_tree"]
    vars(all_states)["remove_tree"] = remove_tree
    (state,) = (each for each in all_states.list_states(os.environ) if each.path == path)
    all_states.remove_state(state)
    said.append("left" if os.path.lexists(path) else "removed")
    start()  # the control
    all_states.remove_state(state)
    return [*said, *os.listdir(os.path.dirname(path))]


def test_a_plugin_cannot_start_while_its_state_is_removed(runner_as_user: Caller) -> None:
    """Also if its launch has not written the record yet that is locked."""
    said = elsewhere.run(runner_as_user, remove_while_it_starts)
    refusal = "state directory PATH is being removed"
    assert said == [refusal, "removed", "started", refusal]
