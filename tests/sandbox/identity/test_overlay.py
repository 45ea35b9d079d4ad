"""Where the changes of an overlay are kept, between launches and while several have them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox.identity.host_side import host_side
from sandbox.identity.overlay import OverlayRefused, open_overlay

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
