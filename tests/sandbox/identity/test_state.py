"""A plugin's state directory: its owner, and directories that are refused."""

from __future__ import annotations

import errno
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sandbox.identity import leases, uids
from sandbox.identity import state as states
from sandbox.identity.accounts import Account
from sandbox.identity.leases import UidsUnavailable
from sandbox.identity.state import (
    RECORDS,
    StateRefused,
    owned_state,
    real_state_dir,
    state_root,
    unwritable,
)
from sandbox.identity.uid_range import DEFAULT_RANGE
from tests import elsewhere
from tests.conftest import SPARE_UID, Caller
from tests.tables import one_case

RANGE = (SPARE_UID + 4, SPARE_UID + 23)

needs_root = pytest.mark.needs("root")


@pytest.fixture(autouse=True)
def own_books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Leases and reservations of this test alone."""
    books = {"leases": str(tmp_path / "leases"), "reservations": str(tmp_path / "reservations")}
    for function in (leases.lease_any, uids.lease_for_state):
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
    """Prepare, wait for a line, claim the directory, print the uid, and stay until told to end."""
    import sys
    import time

    from sandbox.identity import uids
    from sandbox.identity.state import owned_state

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
@one_case("kind", ["file", "fifo", "dangling link"])
def test_a_file_instead_of_a_directory_is_refused(plugin_dir: Path, kind: str) -> None:
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
    assert f"{path} belongs to uid 1000" in str(fault) and f"{RANGE[0]}-{RANGE[1]}" in str(fault)
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
def test_open_permissions_are_closed_at_the_next_run(plugin_dir: Path) -> None:
    path = plugin_dir / "state"
    with owned_state(str(path), RANGE) as first:
        pass
    path.chmod(0o777)
    with owned_state(str(path), RANGE) as second:
        assert (second.uid, mode(path)) == (first.uid, 0o700)


# --- as anybody --------------------------------------------------------------------------------------------


def without_a_range(path: str) -> list[int]:
    import os

    from sandbox.identity.state import owned_state

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


def test_links_are_not_followed_for_an_ordinary_user(plugin_dir: Path) -> None:
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


def test_parts_are_never_made_through_a_link(plugin_dir: Path) -> None:
    """The plugin fills the directory, so the runner's folders in it must not lead elsewhere."""
    uid_range = RANGE if os.geteuid() == 0 else None
    state, victim = plugin_dir / "state", plugin_dir / "victim"
    victim.mkdir()
    with owned_state(str(state), uid_range, ["deep/er"]) as owner:
        assert (state / "deep/er").stat().st_uid == owner.uid  # the control
    (state / "out").symlink_to(victim)
    with pytest.raises(StateRefused, match="out/er"), owned_state(str(state), uid_range, ["out/er"]):
        pytest.fail("it was followed")
    assert os.listdir(victim) == []


# --- links -------------------------------------------------------------------------------------------------


@needs_root
def test_a_link_that_appears_after_the_path_was_resolved(plugin_dir: Path) -> None:
    """Between resolving a path and opening it no link is followed, not even root's."""
    folder, victim = plugin_dir / "folder", plugin_dir / "victim"
    for path in (folder, victim):
        path.mkdir(mode=0o755)
    where = real_state_dir(str(folder / "state"))
    with owned_state(where, RANGE):
        pass  # the control
    os.rmdir(where)
    folder.rename(plugin_dir / "moved")
    folder.symlink_to(victim)
    assert "symbolic link" in str(refused(Path(where)))
    assert (os.listdir(victim), victim.stat().st_uid) == ([], 0)


@pytest.mark.parametrize("name", ["link", "link/below", "link/../state"])
def test_a_link_of_another_user_is_named(plugin_dir: Path, name: str) -> None:
    (plugin_dir / "real").mkdir()
    (plugin_dir / "link").symlink_to("real")  # in /tmp, where everybody may put one
    with pytest.raises(StateRefused) as caught:
        real_state_dir(str(plugin_dir / name))
    assert f"{plugin_dir}/link is a symbolic link to real" in str(caught.value)
    assert caught.value.hint == f"use the path it leads to: {os.path.realpath(plugin_dir / name)}"


def test_a_path_without_links_is_unchanged(plugin_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(plugin_dir)
    assert real_state_dir("not/yet/there") == f"{plugin_dir}/not/yet/there"
    assert real_state_dir("./a//b/") == f"{plugin_dir}/a/b"
    assert real_state_dir("/var/run/x") == os.path.realpath("/var/run") + "/x"  # a link of the system's


# --- a launch that fails -----------------------------------------------------------------------------------


class Failed(Exception):
    pass


def fail(state: Path, uid_range: tuple[int, int] | None, parts: list[str], file: str = "") -> None:
    """A launch that fails when everything is ready, or after `file` was written."""
    with owned_state(str(state), uid_range, parts):
        assert all((state / part).is_dir() for part in parts)
        if file:
            (state / file).touch()
        raise Failed


@pytest.mark.parametrize("before", ["nothing", "a parent", "the directory", "a folder in it"])
def test_directories_made_for_a_failed_launch_are_removed(
    plugin_dir: Path, own_books: dict[str, str], before: str
) -> None:
    uid_range = RANGE if os.geteuid() == 0 else None
    state = plugin_dir / "a/b/state"
    there = {"nothing": "", "a parent": "a", "the directory": "a/b/state", "a folder in it": "a/b/state/part"}
    (plugin_dir / there[before]).mkdir(parents=True, exist_ok=True)
    kept = {path: path.lstat() for path in plugin_dir.rglob("*")}
    empty = before in ("nothing", "a parent", "the directory")
    with pytest.raises(Failed if empty or uid_range is None else StateRefused):
        fail(state, uid_range, ["part/of/it", "other"])
    now = {path: path.lstat() for path in plugin_dir.rglob("*")}
    assert {path: (held.st_uid, held.st_mode) for path, held in now.items()} == {
        path: (held.st_uid, held.st_mode) for path, held in kept.items()
    }
    if uid_range is not None and Path(own_books["reservations"]).exists():
        assert os.listdir(own_books["reservations"]) == []


@pytest.mark.parametrize("swap", ["nothing", "a", "a/b"])
def test_a_failed_launch_removes_nothing_but_its_own_folders(plugin_dir: Path, swap: str) -> None:
    """An instance that runs swaps a folder of the launch: for a link to an empty folder, or for another."""
    uid_range = RANGE if os.geteuid() == 0 else None
    state, victim = plugin_dir / "state", plugin_dir / "victim"
    (victim / "b").mkdir(parents=True)
    with owned_state(str(state), uid_range, ["kept"]):
        pass
    launch = owned_state(str(state), uid_range, ["a/b"])
    launch.__enter__()
    if swap == "a":
        (state / "a").rename(state / "moved")
        (state / "a").symlink_to(victim)
    elif swap == "a/b":
        (state / "a/b").rename(state / "moved")
        (state / "a/b").mkdir()
    assert launch.__exit__(Failed, Failed(), None) is not True
    assert (victim / "b").is_dir()
    assert (state / "a/b").exists() == (swap != "nothing")


@needs_root
@pytest.mark.parametrize("swap", [False, True])
def test_a_folder_put_in_the_place_of_a_new_one_keeps_its_owner(
    plugin_dir: Path, monkeypatch: pytest.MonkeyPatch, swap: bool
) -> None:
    state = plugin_dir / "state"
    with owned_state(str(state), RANGE):
        (state / "private").mkdir(mode=0o700)
        (state / "private/key").touch()

    def mkdir(name: str, *args: Any, **more: Any) -> None:
        real(name, *args, **more)
        if swap and name == "a":
            (state / "a").rename(state / "moved")
            (state / "private").rename(state / "a")

    real = os.mkdir
    monkeypatch.setattr(os, "mkdir", mkdir)
    if not swap:  # the control
        with owned_state(str(state), RANGE, ["a/b"]) as owner:
            assert {(state / each).stat().st_uid for each in ("a", "a/b")} == {owner.uid}
        return
    with pytest.raises(StateRefused, match="was replaced"), owned_state(str(state), RANGE, ["a/b"]):
        pytest.fail("it was given away")
    assert (state / "a").stat().st_uid == 0 and os.listdir(state / "a") == ["key"]


# --- as an account -----------------------------------------------------------------------------------------

ACCOUNT = Account("someone", SPARE_UID, SPARE_UID)


@needs_root
@pytest.mark.parametrize("what", ["a link", "a folder of another"])
def test_a_record_is_kept_in_a_folder_of_roots_alone(plugin_dir: Path, what: str) -> None:
    """The account, or a plugin, may be able to write to the folder that the state directory is in."""
    state, victim = plugin_dir / "state", plugin_dir / "victim"
    victim.mkdir()
    (victim / "state").write_text("of root")
    with owned_state(str(state), RANGE, manifest="/m", account=ACCOUNT):
        assert (plugin_dir / RECORDS / "state").read_text() == "/m"  # the control
    (plugin_dir / RECORDS).rename(plugin_dir / "old")
    if what == "a link":
        (plugin_dir / RECORDS).symlink_to(victim)
    else:
        (plugin_dir / RECORDS).mkdir()
        os.link(victim / "state", plugin_dir / RECORDS / "state")
        os.chown(plugin_dir / RECORDS, SPARE_UID, SPARE_UID)
    with (
        pytest.raises(StateRefused, match=f"record in {RECORDS}") as caught,
        owned_state(str(state), RANGE, manifest="/m", account=ACCOUNT),
    ):
        pytest.fail("it was used")
    assert f"remove {plugin_dir}/{RECORDS}" in caught.value.hint
    assert (victim / "state").read_text() == "of root"


@needs_root
def test_a_directory_swapped_after_the_plan_does_not_become_the_accounts(
    plugin_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, private = plugin_dir / "state", plugin_dir / "private"
    private.mkdir(mode=0o700)
    (private / "key").touch()
    with owned_state(str(state), RANGE, account=ACCOUNT):
        assert state.stat().st_uid == SPARE_UID  # the control

    def swapped(path: str) -> object:
        state.rename(plugin_dir / "old")
        private.rename(state)
        return real(path)

    real = vars(states)["_Directory"]
    monkeypatch.setattr(states, "_Directory", swapped)
    with (
        pytest.raises(StateRefused, match="belongs to uid 0, is not empty"),
        owned_state(str(state), RANGE, account=ACCOUNT),
    ):
        pytest.fail("it was given away")
    assert (state.stat().st_uid, os.listdir(state)) == (0, ["key"])


# --- what stays --------------------------------------------------------------------------------------------


def test_files_written_before_a_launch_failed_stay(plugin_dir: Path) -> None:
    uid_range = RANGE if os.geteuid() == 0 else None
    state = plugin_dir / "state"
    with pytest.raises(Failed):
        fail(state, uid_range, ["part"], "part/file")
    with owned_state(str(state), uid_range) as owner:
        assert (state / "part/file").exists() and state.stat().st_uid == owner.uid


@needs_root
def test_a_failed_launch_takes_nothing_from_another_instance(plugin_dir: Path) -> None:
    state = plugin_dir / "state"
    first = owned_state(str(state), RANGE)
    owner = first.__enter__()
    with owned_state(str(state), RANGE) as other:
        assert other.uid == owner.uid
        assert first.__exit__(Failed, Failed(), None) is not True
        assert state.stat().st_uid == other.uid
    with owned_state(str(state), RANGE) as again:
        assert again.uid == other.uid


@needs_root
def test_without_a_uid_no_directory_is_made(plugin_dir: Path, own_books: dict[str, str]) -> None:
    narrow = (RANGE[0], RANGE[0] + 3)
    with ExitStack() as stack:
        for name in ("one", "two"):
            stack.enter_context(owned_state(str(plugin_dir / name), narrow))
        with pytest.raises(UidsUnavailable, match="runner state remove"):
            stack.enter_context(owned_state(str(plugin_dir / "deep/three"), narrow))
        others = [stack.enter_context(owned_state(None, narrow)).uid for _ in range(2)]  # the control
        assert sorted(others) == [RANGE[0] + 2, RANGE[0] + 3]
    assert sorted(os.listdir(plugin_dir)) == ["one", "two"]


def killed_half_way(path: str, books: dict[str, str], uid_range: list[int]) -> None:
    import os

    from sandbox.identity import uids
    from sandbox.identity.state import owned_state

    def write(path: str, text: str) -> None:
        os._exit(3)

    from sandbox.identity import reservations

    reservations.write_file = write
    uids.lease_for_state.__kwdefaults__ = books
    with owned_state(path, (uid_range[0], uid_range[1]), manifest="/a/plugin.toml"):
        pass


@needs_root
def test_leftovers_of_a_killed_runner_are_reused(
    runner_as_root: Caller, plugin_dir: Path, own_books: dict[str, str]
) -> None:
    path = plugin_dir / "state"
    with elsewhere.start(runner_as_root, killed_half_way, str(path), own_books, RANGE) as process:
        assert process.wait(30) == 3
    assert path.stat().st_uid == 0  # the control: it was killed in between
    with owned_state(str(path), (RANGE[0], RANGE[0])) as owner:
        assert path.stat().st_uid == owner.uid == RANGE[0]


@needs_root
def test_a_state_of_an_earlier_version_keeps_its_uid(plugin_dir: Path, own_books: dict[str, str]) -> None:
    """From the time when the default range was that of systemd's services."""
    path, old = plugin_dir / "state", 61300
    path.mkdir()
    (path / "file").touch()
    os.chown(path, 1000, 1000)
    refused(path)  # the control: somebody else's
    os.chown(path, old, old)
    os.mkdir(own_books["reservations"], 0o700)
    Path(own_books["reservations"], str(old)).write_text(str(path))
    for _ in range(2):
        with owned_state(str(path), DEFAULT_RANGE, manifest="/a/plugin.toml") as owner:
            assert owner.uid == old
    # Not while a service of systemd's has it, though.
    services = plugin_dir / "services"
    services.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sandbox.identity.uid_range.DYNAMIC_USERS", str(services))
        with owned_state(str(path), DEFAULT_RANGE):
            pass
        (services / str(old)).touch()
        with (
            pytest.raises(UidsUnavailable, match="DynamicUser"),
            owned_state(str(path), DEFAULT_RANGE),
        ):
            pytest.fail("two have one uid")


@needs_root
def test_a_state_that_is_being_removed_is_not_started(plugin_dir: Path, own_books: dict[str, str]) -> None:
    path = plugin_dir / "state"
    with owned_state(str(path), RANGE) as owner:
        pass
    removing = uids.lease_exclusively(owner.uid, leases=own_books["leases"])
    assert removing is not None
    with pytest.raises(UidsUnavailable, match="being removed"), owned_state(str(path), RANGE):
        pytest.fail("it was started")
    removing.close()


@needs_root
def test_nobody_is_told_to_open_a_folder_of_roots(plugin_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary user is told to choose another place. A folder of one's own may be opened, and root may
    open any."""
    folder = plugin_dir / "place"
    folder.mkdir()
    path, refused = f"{folder}/runner/plugins/x", PermissionError(errno.EACCES, "Permission denied")
    for uid, owner, opens in ((SPARE_UID, 0, False), (SPARE_UID, SPARE_UID, True), (0, 0, True)):
        os.chown(folder, owner, owner)
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        found = unwritable(path, refused)
        assert found is not None and str(folder) in str(found)
        assert (f"write in {folder}" in found.hint, "XDG_STATE_HOME" in found.hint) == (opens, not opens)
        assert "--state-dir" in found.hint
    monkeypatch.setattr(os, "geteuid", lambda: SPARE_UID)
    gone = unwritable(path, OSError(errno.ENOSPC, "No space left on device"))  # it is not about who may write
    assert gone is not None and "make room" in gone.hint
