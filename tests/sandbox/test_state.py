"""A plugin's state directory: whose it becomes, and what is not taken for one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sandbox import uids
from sandbox.state import StateRefused, owned_state, state_root
from sandbox.uids import UidsUnavailable
from tests import elsewhere
from tests.conftest import Caller

RANGE = (61300, 61319)

needs_root = pytest.mark.needs("root")


@pytest.fixture(autouse=True)
def own_books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Leases and reservations of this test alone."""
    books = {"leases": str(tmp_path / "leases"), "reservations": str(tmp_path / "reservations")}
    for function in (uids.lease_any, uids.lease_for_state):
        monkeypatch.setattr(function, "__kwdefaults__", books)
    only = {"reservations": books["reservations"]}
    monkeypatch.setattr(uids.release_reservation, "__kwdefaults__", only)
    return books


@pytest.fixture(autouse=True)
def _no_open_files_left() -> Any:
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def refused(path: Path) -> StateRefused:
    with pytest.raises(StateRefused) as caught, owned_state(str(path), RANGE):
        pytest.fail("it was taken")
    return caught.value


# --- as root -----------------------------------------------------------------------------------------------


@needs_root
def test_it_is_created_for_the_plugin_alone(plugin_dir: Path) -> None:
    path = plugin_dir / "new/parents/state"
    old = os.umask(0o077)
    try:
        with owned_state(str(path), RANGE) as owner:
            assert RANGE[0] <= owner.uid <= RANGE[1] and owner.gid == owner.uid
            assert (path.stat().st_uid, path.stat().st_gid) == (owner.uid, owner.gid)
            assert mode(path) == 0o700
            assert owner.lease_fd is not None
            os.fstat(owner.lease_fd)
    finally:
        os.umask(old)
    # The plugin has to walk through them, and lists nothing on the way.
    assert mode(path.parent) == mode(path.parent.parent) == 0o711
    subprocess.run(
        ["setpriv", f"--reuid={owner.uid}", f"--regid={owner.uid}", "--clear-groups", "touch", path / "file"],
        check=True,
    )


@needs_root
def test_it_keeps_its_owner_over_runs(plugin_dir: Path) -> None:
    path = plugin_dir / "state"
    with owned_state(str(path), RANGE) as first:
        (path / "file").write_text("kept")
        os.chown(path / "file", first.uid, first.gid)
    # Others come and go meanwhile, without ever getting that uid.
    for _ in range(30):
        with owned_state(None, RANGE) as other, owned_state(str(plugin_dir / "other"), RANGE) as stateful:
            assert len({first.uid, other.uid, stateful.uid}) == 3
    with owned_state(str(path), RANGE) as second:
        assert second.uid == first.uid
        assert (path / "file").stat().st_uid == second.uid
        assert (path / "file").read_text() == "kept"


@needs_root
def test_its_uid_is_held_while_it_runs(plugin_dir: Path) -> None:
    narrow = (RANGE[0], RANGE[0])
    with (
        owned_state(str(plugin_dir / "state"), narrow),
        pytest.raises(UidsUnavailable),
        owned_state(None, narrow),
    ):
        pytest.fail("two plugins share a uid")


@needs_root
def test_a_plugin_without_state_gives_its_uid_back() -> None:
    narrow = (RANGE[0], RANGE[0])
    for _ in range(3):
        with owned_state(None, narrow) as owner:
            assert owner.uid == RANGE[0]


def first_start(path: str, books: dict[str, str], uid_range: list[int]) -> int:
    """Prepare, wait for the word, claim, say who we are, and stay until told to end."""
    import sys
    import time

    from sandbox import uids
    from sandbox.state import owned_state

    uids.lease_for_state.__kwdefaults__ = books
    lease = uids.lease_for_state

    def hesitant(*args: Any) -> Any:
        time.sleep(0.02)  # between having seen the owner and changing it: where another could come in
        return lease(*args)

    uids.lease_for_state = hesitant  # type: ignore[assignment]
    sys.stdin.readline()
    with owned_state(path, (uid_range[0], uid_range[1])) as owner:
        sys.stdout.write(f"{owner.uid}\n")
        sys.stdout.flush()
        sys.stdin.read()
    return owner.uid


@needs_root
def test_first_starts_at_once_choose_one_owner(
    runner_as_root: Caller, plugin_dir: Path, own_books: dict[str, str]
) -> None:
    path = plugin_dir / "state"
    processes = [
        elsewhere.start(runner_as_root, first_start, str(path), own_books, RANGE, stdin=subprocess.PIPE)
        for _ in range(20)
    ]
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
        chosen = {int(elsewhere.line(process)) for process in processes}
    finally:
        for process in processes:
            with process:
                process.kill()
    assert chosen == {path.stat().st_uid}
    assert {file.name for file in Path(own_books["reservations"]).iterdir()} == {str(path.stat().st_uid)}


@needs_root
def test_a_link_is_refused(plugin_dir: Path) -> None:
    target = plugin_dir / "target"
    target.mkdir(mode=0o755)
    link = plugin_dir / "state"
    link.symlink_to(target)
    fault = refused(link)
    assert str(link) in str(fault)
    assert "not a link" in fault.hint and "--state-dir" in fault.hint
    assert (target.stat().st_uid, mode(target)) == (0, 0o755)


@needs_root
@pytest.mark.parametrize("kind", ["file", "fifo", "dangling link"])
def test_what_is_no_directory_is_refused(plugin_dir: Path, kind: str) -> None:
    path = plugin_dir / "state"
    if kind == "file":
        path.write_text("precious")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(plugin_dir / "nowhere")
    refused(path)
    assert path.lstat().st_uid == 0
    assert not (plugin_dir / "nowhere").exists()


@needs_root
def test_a_foreign_directory_with_content_is_refused(plugin_dir: Path) -> None:
    path = plugin_dir / "somebodys"
    path.mkdir(mode=0o755)
    (path / "thesis.tex").write_text("years of work")
    os.chown(path, 1000, 1000)
    fault = refused(path)
    assert f"{path} belongs to uid 1000" in str(fault) and "61300-61319" in str(fault)
    assert (path.stat().st_uid, mode(path)) == (1000, 0o755)
    assert "choose an empty or a new directory" in fault.hint


@needs_root
@pytest.mark.parametrize("foreign", [0, 1000])
def test_an_empty_directory_is_taken_over(plugin_dir: Path, foreign: int) -> None:
    path = plugin_dir / "state"
    path.mkdir()
    path.chmod(0o777)
    os.chown(path, foreign, foreign)
    with owned_state(str(path), RANGE) as owner:
        assert path.stat().st_uid == path.stat().st_gid == owner.uid
        assert mode(path) == 0o700


@needs_root
def test_open_doors_are_shut_at_the_next_run(plugin_dir: Path) -> None:
    path = plugin_dir / "state"
    with owned_state(str(path), RANGE) as first:
        pass
    path.chmod(0o777)
    with owned_state(str(path), RANGE) as second:
        assert (second.uid, mode(path)) == (first.uid, 0o700)


# --- as anybody --------------------------------------------------------------------------------------------


def without_a_range(path: str) -> list[int]:
    import os

    from sandbox.state import owned_state

    os.umask(0)
    with owned_state(path, None) as owner:
        assert owner.lease_fd is None
        return [owner.uid, owner.gid]


@pytest.mark.needs("user")
def test_an_ordinary_user_owns_it(runner_as_user: Caller) -> None:
    path = runner_as_user.home / "a/b/state"
    for _ in range(2):
        assert elsewhere.run(runner_as_user, without_a_range, str(path)) == [runner_as_user.uid] * 2
        assert path.stat().st_uid == runner_as_user.uid
        assert mode(path) == 0o700
        path.chmod(0o755)


def test_an_ordinary_user_gets_no_link_followed(plugin_dir: Path) -> None:
    (plugin_dir / "state").symlink_to(plugin_dir)
    with pytest.raises(StateRefused), owned_state(str(plugin_dir / "state"), None):
        pytest.fail("it was taken")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HOME": "/home/u"}, "/home/u/.local/state/runner/plugins"),
        ({"HOME": "/home/u", "XDG_STATE_HOME": ""}, "/home/u/.local/state/runner/plugins"),
        ({"HOME": "/home/u", "XDG_STATE_HOME": "/var/state"}, "/var/state/runner/plugins"),
        ({"HOME": "/home/u", "XDG_STATE_HOME": "here"}, "/home/u/.local/state/runner/plugins"),
    ],
)
def test_where_it_is_by_default(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert state_root(environ) == expected
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert state_root(environ) == "/var/lib/runner/plugins"


def test_parts_are_made_through_no_link(plugin_dir: Path) -> None:
    """The directory is the plugin's to fill; what the runner makes in it must not lead elsewhere."""
    uid_range = RANGE if os.geteuid() == 0 else None
    state, victim = plugin_dir / "state", plugin_dir / "victim"
    victim.mkdir()
    with owned_state(str(state), uid_range, ["deep/er"]) as owner:
        assert (state / "deep/er").stat().st_uid == owner.uid  # the control
    (state / "out").symlink_to(victim)
    with pytest.raises(StateRefused, match="out/er"), owned_state(str(state), uid_range, ["out/er"]):
        pytest.fail("it was followed")
    assert os.listdir(victim) == []
