"""Where the changes of an overlay are kept, between launches and while several have them."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from sandbox.cell.overlay import OverlaidFolder, add_parts, overlay_orders
from sandbox.doctor.trial import run_spawned
from sandbox.identity.host_side import host_side
from sandbox.identity.overlay import OverlayRefused, open_overlay
from sandbox.spawn.order import OVERLAY, folder_path

OWN = os.geteuid(), os.getegid()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "plugins/demo").mkdir(parents=True)
    return tmp_path / "plugins/demo"


def test_nothing_is_kept_of_launches_that_changed_nothing(state: Path) -> None:
    with open_overlay(str(state), "a", *OWN) as first, open_overlay(str(state), "a", *OWN) as second:
        # Both have the same changes, and each a folder of its own for what overlayfs does meanwhile.
        assert os.path.samestat(os.fstat(first.upper), os.fstat(second.upper)) and first.work != second.work
        assert {first.work, second.work} < set(os.listdir(f"/proc/self/fd/{first.folder}"))
    assert os.listdir(state.parent) == ["demo"]


def test_changes_stay_until_the_state_is_removed(state: Path) -> None:
    with open_overlay(str(state), "a", *OWN) as held:
        os.mkdir("new", dir_fd=held.upper)
        os.chmod(f"/proc/self/fd/{held.upper}", 0)  # as a plugin may do
        # A launch that ends first does not take it from the others.
        with open_overlay(str(state), "a", *OWN):
            pass
        assert held.work in os.listdir(f"/proc/self/fd/{held.folder}")
    folder = Path(host_side(str(state)), "overlays/a")
    assert sorted(os.listdir(folder)) == ["lock", "upper"]
    # What a launch left that was killed is removed by the next.
    (folder / "work-0/work").mkdir(parents=True)
    (folder / "work-0/work").chmod(0)
    with open_overlay(str(state), "a", *OWN) as held, open_overlay(str(state), "b", *OWN):
        assert sorted(os.listdir(folder)) == ["lock", "upper", held.work]
        assert os.listdir(f"/proc/self/fd/{held.upper}") == ["new"]
    assert os.listdir(folder.parent) == ["a"]


def test_changes_of_another_uid_are_not_used(state: Path) -> None:
    with open_overlay(str(state), "a", *OWN) as held:
        os.mkdir("new", dir_fd=held.upper)
    refused = pytest.raises(OverlayRefused, match="runner state remove")
    with refused, open_overlay(str(state), "a", OWN[0] + 1, OWN[1]):
        pass
    with open_overlay(str(state), "a", *OWN) as held:  # and stay
        assert os.listdir(f"/proc/self/fd/{held.upper}") == ["new"]


def test_what_a_killed_launch_made_by_half_is_used(state: Path) -> None:
    folder = Path(host_side(str(state)), "overlays/a")
    for each in (folder.parents[2], folder.parents[1], folder.parents[0], folder, folder / "upper"):
        each.mkdir(mode=0o700)
    plugin = (OWN[0] + 1, OWN[1]) if OWN[0] == 0 else OWN  # only root's plugin has another uid
    with open_overlay(str(state), "a", *plugin) as held:
        assert os.fstat(held.upper).st_uid == plugin[0] and folder.stat().st_mode & 0o777 == 0o711


def test_a_link_in_their_place_is_not_followed(state: Path, tmp_path: Path) -> None:
    with open_overlay(str(state), "a", *OWN) as held:
        os.mkdir("new", dir_fd=held.upper)
    folder = Path(host_side(str(state)), "overlays/a")
    (folder / "upper").rename(tmp_path / "elsewhere")
    (folder / "upper").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotADirectoryError), open_overlay(str(state), "a", *OWN):
        pass


@pytest.mark.launches
def test_a_link_in_the_place_of_a_layer_is_not_followed(plugin_dir: Path) -> None:
    """Another program of the caller may write beside a state directory that was chosen, also meanwhile."""
    plugin = (65534, 65534) if OWN[0] == 0 else OWN
    lower, changes, aim = plugin_dir / "lower", plugin_dir / "changes", plugin_dir / "aim"
    layers = [folder / name for folder in (changes, aim) for name in ("upper", "work")]
    for folder in (lower, changes, aim, *layers):
        folder.mkdir()
        os.chown(folder, *plugin)
    opened = [os.open(path, os.O_PATH | os.O_DIRECTORY) for path in (lower, changes)]

    def mount() -> tuple[str, int]:
        with ExitStack() as stack:
            mounts: dict[str, tuple[int, bool]] = {}
            binds: dict[str, tuple[int, str]] = {}
            folder = OverlaidFolder("/x", (opened[0], str(lower)), (opened[1], str(changes)), "work")
            add_parts(stack, [folder], plugin if OWN[0] == 0 else None, mounts, binds)
            order = overlay_orders([folder], [*mounts, *binds])
            run = run_spawned(
                ("/bin/sh", "-c", f": > {folder_path(2)}/new"),
                uid=plugin[0] if OWN[0] == 0 else None,
                mounts=tuple(mounts.values()),
                binds=tuple(binds.values()),
                overlays=order,
            )
        return run.stage, run.number

    try:
        if (control := mount())[0] == OVERLAY:
            pytest.skip(f"this machine mounts no overlay: {control}")
        assert os.listdir(changes / "upper") == ["new"]
        changes.rename(plugin_dir / "aside")
        changes.mkdir(mode=0o711)
        os.close(opened.pop())
        opened.append(os.open(changes, os.O_PATH | os.O_DIRECTORY))
        for name in ("upper", "work"):
            (changes / name).symlink_to(aim / name)
        assert mount() == (OVERLAY, errno.ENOTDIR)
        assert os.listdir(aim / "upper") == []
    finally:
        for each in plugin_dir.glob("*/work/work"):  # the kernel makes it without permissions
            each.chmod(0o700)
        for fd in opened:
            os.close(fd)
