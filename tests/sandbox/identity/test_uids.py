"""Leases and reservations of uids. Nothing here needs the uids themselves, so nothing here needs root."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sandbox import look
from sandbox.identity import leases, reservations, uid_range, uids
from sandbox.identity.leases import UidLease, UidsUnavailable, lease_any
from sandbox.identity.uid_range import id_is_mapped
from sandbox.identity.uids import lease_for_state
from tests import elsewhere
from tests.conftest import ROOT, SPARE_UID


class Books(NamedTuple):
    """Folders for leases and reservations, apart from the machine's own."""

    leases: str
    reservations: str

    def any(self, first: int, last: int) -> UidLease:
        return lease_any(first, last, leases=self.leases, reservations=self.reservations)

    def state(self, path: Path, owner: int, first: int, last: int, manifest: str = "") -> UidLease:
        return lease_for_state(
            str(path), owner, first, last, manifest, leases=self.leases, reservations=self.reservations
        )

    def reserve(self, uid: int, path: str) -> None:
        """Reserve as an older runner did, without a manifest."""
        Path(self.reservations).mkdir(parents=True, exist_ok=True)
        Path(self.reservations, str(uid)).write_text(path)

    def reserved(self) -> dict[int, str]:
        files = Path(self.reservations).iterdir()
        return {int(file.name): file.read_text() for file in files if not file.suffix}

    @property
    def own_place(self) -> Path:
        """The runner's own folder for states."""
        return Path(self.reservations).parent / "plugins"


@pytest.fixture
def books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Books:
    # Who else has these uids is asked below. Here they are small numbers, and one's own.
    monkeypatch.setattr(uids, "in_use", lambda uid: "")
    monkeypatch.setattr(leases, "in_use", lambda uid: "")
    return Books(str(tmp_path / "run/uids"), str(tmp_path / "lib/runner/uids"))


@pytest.fixture
def own_directory(tmp_path: Path) -> Path:
    """A directory owned by the user of the tests, so that reservations of that uid are not stale."""
    path = tmp_path / "state"
    path.mkdir()
    return path


ME = os.geteuid()


# --- leases ------------------------------------------------------------------------------------------------


def test_two_leases_are_never_equal(books: Books) -> None:
    leases = [books.any(500, 539) for _ in range(20)]
    assert {lease.uid for lease in leases} == set(range(520, 540))
    for lease in leases:
        lease.close()


def test_an_exhausted_range_says_what_to_do(books: Books) -> None:
    leases = [books.any(500, 502) for _ in range(2)]
    open_files = os.listdir("/proc/self/fd")
    with pytest.raises(
        UidsUnavailable,
        match=r"^all uids from 501 to 502 .* widen the range with \[user\] uids in the policy$",
    ):
        books.any(500, 502)
    assert os.listdir("/proc/self/fd") == open_files
    leases.pop().close()
    books.any(500, 502).close()
    for lease in leases:
        lease.close()


def test_a_range_of_one(books: Books) -> None:
    lease = books.any(7, 7)
    assert lease.uid == 7
    with pytest.raises(UidsUnavailable):
        books.any(7, 7)
    lease.close()


def test_a_closed_lease_is_free_again(books: Books) -> None:
    for _ in range(3):
        lease = books.any(500, 500)
        assert lease.uid == 500
        lease.close()


def test_closing_another_descriptor_of_the_file_keeps_the_lease(books: Books) -> None:
    # POSIX locks would be lost here: they go with any descriptor of the file that the process closes.
    lease = books.any(500, 500)
    os.close(os.open(books.leases, os.O_RDWR))
    with pytest.raises(UidsUnavailable):
        books.any(500, 500)
    lease.close()


def test_a_lease_survives_its_parent_in_a_process_that_inherited_it(books: Books) -> None:
    """The runner dies, and a process of the tree lives on: the uid stays leased until that has ended
    too."""
    program = """
import os, subprocess, sys
from sandbox.identity.leases import lease_any
lease = lease_any(500, 500, leases=sys.argv[1], reservations=sys.argv[2])
os.set_inheritable(lease.fd, True)
holder = subprocess.Popen(["/bin/cat"], close_fds=False)
print("leased", flush=True)
os._exit(0)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, books.leases, books.reservations],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        bufsize=0,
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        assert elsewhere.line(parent) == b"leased\n"
        assert parent.wait(20) == 0
        with pytest.raises(UidsUnavailable):
            books.any(500, 500)
        parent.stdin.close()  # cat ends
        assert parent.stdout.read() == b""  # cat has ended
    lease = _when_free(books, 500)
    assert lease.uid == 500
    lease.close()


def _when_free(books: Books, uid: int) -> UidLease:
    """The kernel closes the files of a dying process one by one: ours may come after its stdout."""
    fd = os.open(books.leases, os.O_RDWR)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, leases.FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, uid, 1, 0))
    os.close(fd)
    return books.any(uid, uid)


def test_fifty_processes_at_once_get_fifty_uids(books: Books) -> None:
    program = """
import sys
from sandbox.identity.leases import lease_any
sys.stdin.readline()
print(lease_any(5000, 5099, leases=sys.argv[1], reservations=sys.argv[2]).uid, flush=True)
sys.stdin.read()
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, books.leases, books.reservations],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            bufsize=0,
        )
        for _ in range(50)
    ]
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
        got = [int(elsewhere.line(process)) for process in processes]
        assert sorted(got) == list(range(5050, 5100))
    finally:
        for process in processes:
            with process:
                process.kill()


def test_the_file_of_leases_is_not_reached_through_a_link(books: Books, tmp_path: Path) -> None:
    Path(books.leases).parent.mkdir()
    Path(books.leases).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        books.any(500, 500)
    assert not (tmp_path / "elsewhere").exists()


# --- reservations ------------------------------------------------------------------------------------------


def test_a_first_start_reserves_a_uid(books: Books, own_directory: Path) -> None:
    lease = books.state(own_directory, 1_000_000, 500, 509)  # owned by somebody outside of the range
    assert 500 <= lease.uid <= 509
    assert books.reserved() == {lease.uid: str(own_directory)}
    lease.close()


def test_the_directory_keeps_its_uid(books: Books, own_directory: Path) -> None:
    for _ in range(3):
        lease = books.state(own_directory, ME, ME, ME + 50)
        assert lease.uid == ME
        lease.close()
    assert books.reserved() == {ME: str(own_directory)}


def test_instances_of_one_plugin_share_their_uid(books: Books, own_directory: Path) -> None:
    first = books.state(own_directory, ME, ME, ME + 1)
    second = books.state(own_directory, ME, ME, ME + 1)
    assert first.uid == second.uid == ME
    # And nobody else gets it while either lives.
    first.close()
    with pytest.raises(UidsUnavailable):
        books.any(ME, ME)
    second.close()


def test_a_reserved_uid_is_not_leased_to_another_plugin(books: Books, own_directory: Path) -> None:
    books.state(own_directory, ME, ME, ME + 1).close()  # reserved, not running
    with pytest.raises(UidsUnavailable):
        books.any(ME, ME)
    books.any(ME + 1, ME + 1).close()  # the control


def test_a_uid_reserved_during_the_search_is_left_alone(
    books: Books, own_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    look = leases.is_unreserved

    def looked_too_early(reservations: str, uid: int) -> bool:
        found = look(reservations, uid)
        monkeypatch.setattr(leases, "is_unreserved", look)
        books.state(own_directory, ME, ME, ME).close()
        return found

    monkeypatch.setattr(leases, "is_unreserved", looked_too_early)
    with pytest.raises(UidsUnavailable):
        books.any(ME, ME)
    assert leases.is_unreserved is look  # the control: it was reserved in between
    with pytest.raises(UidsUnavailable):
        books.state(other, ME, ME, ME)
    assert books.reserved() == {ME: str(own_directory)}


def test_a_uid_of_another_directory_is_refused(books: Books, own_directory: Path, tmp_path: Path) -> None:
    books.state(own_directory, ME, ME, ME + 1).close()
    copy = tmp_path / "copy"  # as `cp -a` of a state directory leaves it: same owner, other name
    copy.mkdir()
    with pytest.raises(UidsUnavailable, match=f"uid {ME}, which owns {copy}, is in use by, or reserved for"):
        books.state(copy, ME, ME, ME + 1)
    assert books.reserved() == {ME: str(own_directory)}


def test_a_uid_that_a_stateless_plugin_has_is_refused(books: Books, own_directory: Path) -> None:
    running = books.any(ME, ME)
    with pytest.raises(UidsUnavailable, match=f"uid {ME}, which owns {own_directory}"):
        books.state(own_directory, ME, ME, ME)
    running.close()
    books.state(own_directory, ME, ME, ME).close()


@pytest.mark.parametrize(
    "what", ["its directory is gone", "its directory belongs to another", "it is empty", "it is a bare word"]
)
def test_a_stale_reservation_is_used_again(
    books: Books, own_directory: Path, tmp_path: Path, what: str
) -> None:
    uid = ME
    if what == "its directory is gone":
        books.reserve(uid, str(tmp_path / "gone"))
    elif what == "its directory belongs to another":
        uid = ME + 1
        books.reserve(uid, str(own_directory))
    elif what == "it is empty":
        books.reserve(uid, "")
    else:
        books.reserve(uid, "nonsense")
    lease = books.any(uid, uid)
    assert lease.uid == uid
    lease.close()
    lease = books.state(own_directory, 1_000_000, uid, uid)
    assert lease.uid == uid
    assert books.reserved() == {uid: str(own_directory)}
    lease.close()


def test_a_reservation_moves_with_the_directory(books: Books, own_directory: Path, tmp_path: Path) -> None:
    books.state(own_directory, ME, ME, ME).close()
    moved = own_directory.rename(tmp_path / "moved")
    lease = books.state(moved, ME, ME, ME)
    assert lease.uid == ME
    assert books.reserved() == {ME: str(moved)}
    lease.close()


def test_foreign_files_among_the_reservations_are_ignored(books: Books) -> None:
    books.reserve(500, "/nowhere")
    Path(books.reservations, "README").write_text("not a uid")
    Path(books.reservations, "501.part").write_text("/")
    leases = [books.any(uid, uid) for uid in (500, 501)]
    assert {lease.uid for lease in leases} == {500, 501}
    for lease in leases:
        lease.close()


def test_reservations_are_private_to_the_runner(books: Books, own_directory: Path) -> None:
    books.state(own_directory, ME, ME, ME).close()
    assert Path(books.reservations).stat().st_mode & 0o777 == 0o700
    assert Path(books.reservations, str(ME)).stat().st_mode & 0o777 == 0o600
    assert Path(books.leases).stat().st_mode & 0o777 == 0o600


def test_a_reserved_directory_with_a_name_that_is_not_text(books: Books, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"st\xffate")
    path.mkdir()
    for _ in range(2):
        lease = books.state(path, ME, ME, ME)
        assert lease.uid == ME
        lease.close()


# --- how long a reservation lasts --------------------------------------------------------------------------


def plugin_state(books: Books, name: str) -> Path:
    path = books.own_place / name
    path.mkdir(parents=True)
    return path


def test_a_reservation_remembers_manifest_and_state(
    books: Books, own_directory: Path, tmp_path: Path
) -> None:
    manifest = tmp_path / "plugin.toml"
    books.state(own_directory, ME, ME, ME, str(manifest)).close()
    assert reservations.list_reservations(books.reservations) == [(ME, str(own_directory), str(manifest), ())]
    books.state(own_directory, ME, ME, ME, f"{manifest}.moved").close()
    assert reservations.list_reservations(books.reservations) == [
        (ME, str(own_directory), f"{manifest}.moved", ())
    ]


def test_a_reservation_of_an_older_version(books: Books, own_directory: Path) -> None:
    """It holds the directory and no manifest. That version can also read our reservations."""
    books.reserve(ME, str(own_directory))
    assert reservations.list_reservations(books.reservations) == [(ME, str(own_directory), "", ())]
    lease = books.state(own_directory, ME, ME, ME, "/a/plugin.toml")
    assert (lease.uid, lease.new) == (ME, False)
    lease.close()
    assert Path(books.reservations, str(ME)).read_text() == str(own_directory)


def test_a_uid_stays_reserved_while_its_manifest_exists(books: Books, tmp_path: Path) -> None:
    """State removed, manifest there: the uid is kept, and found again. Both removed: it is free."""
    manifest = tmp_path / "plugin.toml"
    manifest.touch()
    state = plugin_state(books, "one.123")
    first = books.state(state, -1, 5000, 5007, str(manifest))
    first.close()
    state.rmdir()
    for name in ("a", "b", "c"):  # three others are all that finds room beside it
        path = plugin_state(books, name)
        books.state(path, -1, 5000, 5007, str(manifest)).close()
        os.chown(path, books_uid(books, path), -1) if ME == 0 else None
    again = books.state(state, -1, 5000, 5007, str(manifest))
    assert (again.uid, again.new) == (first.uid, False)
    again.close()
    manifest.unlink()
    lease = books.any(first.uid, first.uid)
    lease.close()


def books_uid(books: Books, path: Path) -> int:
    return next(uid for uid, held in books.reserved().items() if held == str(path))


def test_a_removed_directory_chosen_by_the_operator_frees_its_uid(books: Books, tmp_path: Path) -> None:
    """One manifest may be started with a new directory each time."""
    manifest = tmp_path / "plugin.toml"
    manifest.touch()
    for name in range(20):
        books.state(tmp_path / f"gone-{name}", -1, 5000, 5007, str(manifest)).close()
    assert len(books.reserved()) == 1


def test_a_full_range_reuses_uids_of_removed_states(books: Books, tmp_path: Path) -> None:
    manifest = tmp_path / "plugin.toml"
    manifest.touch()
    for name in range(10):  # none of these directories exists any more, and their manifest does
        books.state(books.own_place / f"gone-{name}", -1, 5000, 5007, str(manifest)).close()
    assert len(books.reserved()) == 4


def test_an_empty_state_without_a_manifest_is_collected(books: Books, tmp_path: Path) -> None:
    def start(name: str, manifest: Path) -> Path:
        path = plugin_state(books, name)
        books.state(path, path.stat().st_uid, ME, ME, str(manifest)).close()
        return path

    manifest = tmp_path / "plugin.toml"
    manifest.touch()
    first = start("first", manifest)
    with pytest.raises(UidsUnavailable):  # the control: as long as its manifest is there, it stays
        start("second", manifest)
    manifest.unlink()
    (first / "data").touch()
    with pytest.raises(UidsUnavailable):  # nor is anything removed that has content
        start("third", manifest)
    (first / "data").unlink()
    start("fourth", manifest)
    assert not first.exists()


def test_reservations_do_not_take_the_uids_of_plugins_without_state(books: Books, tmp_path: Path) -> None:
    states = [tmp_path / "one", tmp_path / "two", tmp_path / "three"]
    leases = []
    for path in states[:2]:
        path.mkdir()
        leases.append(books.state(path, -1, 5000, 5003))
    assert {lease.uid for lease in leases} == {5000, 5001}
    with pytest.raises(UidsUnavailable, match=r"runner state remove.* widen the range with \[user\] uids"):
        books.state(states[2], -1, 5000, 5003)
    others = [books.any(5000, 5003) for _ in range(2)]
    assert {lease.uid for lease in others} == {5002, 5003}
    full = uids.occupancy(5000, 5003, leases=books.leases, reservations=books.reservations)
    assert (full.for_states, full.running, full.for_others) == (2, 2, 2)
    for lease in (*leases, *others):
        lease.close()


@pytest.mark.parametrize("what", ["a draft", "a manifest alone", "an empty file"])
def test_a_runner_killed_while_it_reserved(books: Books, own_directory: Path, what: str) -> None:
    Path(books.reservations).mkdir(parents=True)
    name = {"a draft": f"{ME}.draft", "a manifest alone": f"{ME}.manifest", "an empty file": str(ME)}[what]
    Path(books.reservations, name).write_text("" if what == "an empty file" else "/half/a/pa")
    assert reservations.list_reservations(books.reservations) == []
    books.any(ME, ME).close()
    books.state(own_directory, ME, ME, ME, "/a/plugin.toml").close()
    assert reservations.list_reservations(books.reservations) == [
        (ME, str(own_directory), "/a/plugin.toml", ())
    ]


# --- files left elsewhere ----------------------------------------------------------------------------------


def writing(books: Books, state: Path, manifest: str, left: Path) -> UidLease:
    """A plugin without state that leaves files in a folder."""
    places = {"leases": books.leases, "reservations": books.reservations}
    lease = uids.lease_for_writing(str(state), 5000, 5007, manifest, **places)
    reservations.record_left_folders(lease.uid, [str(left)], reservations=books.reservations)
    return lease


def test_a_plugin_without_state_keeps_its_uid(books: Books, tmp_path: Path) -> None:
    manifest, left, other = tmp_path / "plugin.toml", tmp_path / "left", tmp_path / "other"
    manifest.touch()
    left.mkdir()
    other.mkdir()
    state = books.own_place / "writer.1"
    expected = uids.expected_uid(str(state), 5000, 5007, reservations=books.reservations)
    # Somebody has the first that is looked at: its own is another one, and stays so when that is free again.
    assert expected is not None
    books.reserve(expected, str(other))
    Path(f"{books.reservations}/{expected}.left").write_text(str(other))
    second = uids.expected_uid(str(state), 5000, 5007, reservations=books.reservations)
    assert second not in (None, expected)
    first = writing(books, state, str(manifest), left)
    assert first.uid == second
    for name in (str(expected), f"{expected}.left"):
        os.unlink(f"{books.reservations}/{name}")
    again = writing(books, state, str(manifest), other)  # at the same time, and with another folder
    assert again.uid == first.uid
    assert uids.expected_uid(str(state), 5000, 5007, reservations=books.reservations) == first.uid
    (held,) = reservations.list_reservations(books.reservations)
    assert held == (first.uid, str(state), str(manifest), (str(left), str(other)))
    first.close()
    again.close()


def test_a_uid_stays_reserved_while_a_folder_with_its_files_exists(
    books: Books, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, left = tmp_path / "plugin.toml", tmp_path / "left"
    manifest.touch()
    left.mkdir()
    lease = writing(books, books.own_place / "writer.1", str(manifest), left)
    lease.close()
    manifest.unlink()
    # Neither by somebody who has to have it, nor when nothing else is free.
    theirs: list[str] = []
    monkeypatch.setattr(
        reservations, "first_owned_by", lambda uid, folder: f"{folder}/file" if not theirs else None
    )
    with pytest.raises(UidsUnavailable):
        books.state(tmp_path / "other", 0, lease.uid, lease.uid)
    others = [books.state(tmp_path / f"other{n}", 0, 5000, 5007) for n in range(3)]
    assert lease.uid not in {other.uid for other in others}
    with pytest.raises(UidsUnavailable, match="all uids from 5000 to 5003 for plugins with state are"):
        books.state(tmp_path / "one too many", 0, 5000, 5007)
    # The control: when nothing of that uid is left there it is free.
    theirs.append("gone")
    books.state(tmp_path / "one too many", 0, 5000, 5007).close()
    for other in others:
        other.close()


def test_the_owner_of_a_folder_does_not_decide_the_uid(books: Books, tmp_path: Path) -> None:
    """The folder was prepared for the plugin whose refusal named that uid: `chown UID FOLDER`."""
    places: Any = {"reservations": books.reservations}
    mine, *others = (str(books.own_place / f"writer.{number}") for number in range(100))
    told = uids.expected_uid(mine, 5000, 5007, **places)
    assert told is not None
    # Where a search starts depends on the name: one of four may start at the same.
    other = next(each for each in others if uids.expected_uid(each, 5000, 5007, **places) != told)
    left = tmp_path / "left"
    left.mkdir()
    stranger = writing(books, Path(other), "/nonexistent/manifest", left)
    assert stranger.uid != told
    owner = writing(books, Path(mine), "/nonexistent/manifest", left)
    assert owner.uid == told
    stranger.close()
    owner.close()


@pytest.mark.parametrize("uid", [61500, uid_range.DEFAULT_RANGE[0], uid_range.DEFAULT_RANGE[1], 5003])
def test_uids_of_plugins_under_other_policies(books: Books, uid: int) -> None:
    """Independent of the range of the current policy."""
    places: Any = {"reservations": books.reservations}
    assert not uids.may_be_a_plugins(1000, 7000, 7010, **places)
    books.reserve(5003, "/some/state")
    assert uids.may_be_a_plugins(uid, 7000, 7010, **places)


# --- who else has them -------------------------------------------------------------------------------------


UNUSED = SPARE_UID + 1  # by anybody, and so is the one before it


def test_an_unused_uid() -> None:
    assert uid_range.in_use(UNUSED) == ""


@pytest.mark.parametrize("what", ["an account", "a group", "a service", "a process"])
def test_a_uid_in_use_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, request: pytest.FixtureRequest
) -> None:
    accounts, services = [tmp_path / "passwd", tmp_path / "group"], tmp_path / "dynamic-uid"
    services.mkdir()
    for table in accounts:
        table.write_text("root:x:0:0::/:/bin/sh\n")
    monkeypatch.setattr(uid_range, "ACCOUNTS", tuple(map(str, accounts)))
    monkeypatch.setattr(uid_range, "DYNAMIC_USERS", str(services))
    books = Books(str(tmp_path / "leases"), str(tmp_path / "uids"))
    books.any(UNUSED, UNUSED).close()  # the control
    process = None
    if what == "a service":
        (services / str(UNUSED)).write_text("unit\n")
    elif what == "a process":
        if os.geteuid() != 0:
            pytest.skip("needs root")
        words = [
            f"--reuid={UNUSED}",
            f"--regid={UNUSED}",
            "--clear-groups",
            "sh",
            "-c",
            "echo; exec sleep 60",
        ]
        process = subprocess.Popen(["setpriv", *words], stdout=subprocess.PIPE)
        elsewhere.line(process)
    else:
        line = f"svc:x:{UNUSED}:{UNUSED}::/:/bin/false\n" if what == "an account" else f"svc:x:{UNUSED}:\n"
        with accounts[what == "a group"].open("a") as file:
            file.write(line)
    try:
        assert uid_range.in_use(UNUSED) and not uid_range.in_use(UNUSED - 1)
        with pytest.raises(UidsUnavailable):
            books.any(UNUSED, UNUSED)
        with pytest.raises(UidsUnavailable):
            books.state(tmp_path / "state", -1, UNUSED, UNUSED)
        # Nor does a plugin run with its own uid, while somebody else does.
        (tmp_path / "owned").mkdir()
        with pytest.raises(UidsUnavailable, match=f"uid {UNUSED}, which owns .* is used elsewhere: "):
            books.state(tmp_path / "owned", UNUSED, UNUSED, UNUSED)
    finally:
        if process is not None:
            with process:
                process.kill()
    if process is not None:
        books.any(UNUSED, UNUSED).close()


def test_the_default_range_is_not_that_of_systemd() -> None:
    (first, last), dynamic = uid_range.DEFAULT_RANGE, uid_range.DYNAMIC_USER_RANGE
    assert not (first <= dynamic[1] and dynamic[0] <= last)
    assert (first, last) == (0x7FFF0000, 0x7FFFFFFF)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("0 0 4294967295\n", uid_range.DEFAULT_RANGE),
        ("0 100000 65536\n", uid_range.DYNAMIC_USER_RANGE),  # a container with 65536 ids
        ("0 1000 1\n", None),
    ],
)
def test_the_range_that_exists_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, table: str, expected: tuple[int, int] | None
) -> None:
    (tmp_path / "map").write_text(table)
    look = uid_range.id_is_mapped
    monkeypatch.setattr(
        uid_range, "id_is_mapped", lambda first, last, path: look(first, last, str(tmp_path / "map"))
    )
    assert uid_range.usable_range(uid_range.DEFAULT_RANGE) == expected
    # What an operator has written stays as it is.
    assert uid_range.usable_range((900000, 900001)) == ((900000, 900001) if "4294967295" in table else None)


# --- which uids exist --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "first", "last", "expected"),
    [
        ("0 0 4294967295\n", 61184, 65519, True),
        ("0 100000 65536\n", 61184, 65519, True),
        ("0 100000 65519\n", 61184, 65519, False),  # one short
        ("0 100000 65520\n", 61184, 65519, True),
        ("0 1000 1\n", 61184, 65519, False),
        ("0 1000 1\n1 100000 65536\n", 61184, 65519, True),
        ("0 1000 62000\n62000 200000 4000\n", 61184, 65519, True),  # adjoining
        ("62000 200000 4000\n0 1000 62000\n", 61184, 65519, True),  # in any order
        ("0 1000 62000\n62001 200000 4000\n", 61184, 65519, False),  # a gap
        ("", 0, 0, False),
        ("0 0 1\n", 0, None, True),
        ("0 0 1\n", 1, None, False),
    ],
)
def test_ids_of_a_user_namespace(
    tmp_path: Path, table: str, first: int, last: int | None, expected: bool
) -> None:
    (tmp_path / "uid_map").write_text(table)
    assert id_is_mapped(first, last, path=str(tmp_path / "uid_map")) is expected


def test_stale_reservations_are_removed(books: Books, own_directory: Path) -> None:
    books.reserve(501, "/nonexistent/gone")
    books.reserve(502, "")
    lease = books.state(own_directory, ME, 600, 610)
    assert set(books.reserved()) == {lease.uid}
    lease.close()


def test_whether_a_uid_is_a_plugins_is_seen_to_change(books: Books) -> None:
    """A stored plan rests on it: another policy's plugin may get the uid of a folder's owner reserved."""
    Path(books.reservations).mkdir(parents=True)
    with look.recording() as asked:
        assert not uids.may_be_a_plugins(1000, 7000, 7010, reservations=books.reservations)
    assert asked.facts.changed({}) == ""
    books.reserve(1000, "/srv/state")
    assert asked.facts.changed({}) == f"{books.reservations}/1000"
