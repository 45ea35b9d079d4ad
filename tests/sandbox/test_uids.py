"""Leases and reservations of uids. Nothing here needs the uids themselves, so nothing here needs root."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from sandbox import uids
from sandbox.uids import UidLease, UidsUnavailable, id_is_mapped, lease_any, lease_for_state
from tests import elsewhere
from tests.conftest import ROOT


class Books(NamedTuple):
    """Where leases and reservations are written down, away from the machine's own."""

    leases: str
    reservations: str

    def any(self, first: int, last: int) -> UidLease:
        return lease_any(first, last, leases=self.leases, reservations=self.reservations)

    def state(self, path: Path, owner: int, first: int, last: int) -> UidLease:
        return lease_for_state(
            str(path), owner, first, last, leases=self.leases, reservations=self.reservations
        )

    def reserve(self, uid: int, path: str) -> None:
        Path(self.reservations).mkdir(parents=True, exist_ok=True)
        Path(self.reservations, str(uid)).write_text(path)

    def reserved(self) -> dict[int, str]:
        return {int(file.name): file.read_text() for file in Path(self.reservations).iterdir()}


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books(str(tmp_path / "run/uids"), str(tmp_path / "lib/runner/uids"))


@pytest.fixture
def own_directory(tmp_path: Path) -> Path:
    """A directory owned by whoever runs the tests, so that reservations of that uid are not stale."""
    path = tmp_path / "state"
    path.mkdir()
    return path


ME = os.geteuid()


# --- leases ------------------------------------------------------------------------------------------------


def test_two_leases_are_never_equal(books: Books) -> None:
    leases = [books.any(500, 519) for _ in range(20)]
    assert {lease.uid for lease in leases} == set(range(500, 520))
    for lease in leases:
        lease.close()


def test_an_exhausted_range_says_what_to_do(books: Books) -> None:
    leases = [books.any(500, 502) for _ in range(3)]
    open_files = os.listdir("/proc/self/fd")
    with pytest.raises(
        UidsUnavailable, match=r"^all uids from 500 to 502 .* widen \[user\] uids in the policy$"
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


def test_a_lease_survives_its_parent_in_whoever_inherited_it(books: Books) -> None:
    """The runner dies, something of the tree lives on: the uid stays taken until that is gone too."""
    program = """
import os, subprocess, sys
from sandbox.uids import lease_any
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
    """The kernel closes a dying process's files one after the other: ours may come after its stdout."""
    fd = os.open(books.leases, os.O_RDWR)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, uids._FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, uid, 1, 0))
    os.close(fd)
    return books.any(uid, uid)


def test_fifty_processes_at_once_get_fifty_uids(books: Books) -> None:
    program = """
import sys
from sandbox.uids import lease_any
sys.stdin.readline()
print(lease_any(500, 549, leases=sys.argv[1], reservations=sys.argv[2]).uid, flush=True)
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
        assert sorted(got) == list(range(500, 550))
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
    others = books.any(ME, ME + 1)
    assert others.uid == ME + 1
    with pytest.raises(UidsUnavailable):
        books.any(ME, ME + 1)
    others.close()
    second.close()


def test_a_reserved_uid_is_leased_to_nobody_else(books: Books, own_directory: Path) -> None:
    books.state(own_directory, ME, ME, ME + 1).close()  # reserved, not running
    for _ in range(20):  # the search starts at a random place
        lease = books.any(ME, ME + 1)
        assert lease.uid == ME + 1
        lease.close()
    with pytest.raises(UidsUnavailable, match="in use or reserved"):
        books.any(ME, ME)


def test_a_uid_reserved_during_the_search_is_left_alone(
    books: Books, own_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    look = uids._reserved

    def looked_too_early(reservations: str) -> set[int]:
        found = look(reservations)
        with monkeypatch.context() as patch:
            patch.setattr(uids, "_reserved", look)
            books.state(own_directory, ME, ME, ME).close()
        return found

    monkeypatch.setattr(uids, "_reserved", looked_too_early)
    with pytest.raises(UidsUnavailable):
        books.any(ME, ME)
    (Path(books.reservations) / str(ME)).unlink()
    with pytest.raises(UidsUnavailable):
        books.state(other, ME, ME, ME)
    assert books.reserved() == {ME: str(own_directory)}


def test_a_uid_of_another_directory_is_refused(books: Books, own_directory: Path, tmp_path: Path) -> None:
    books.state(own_directory, ME, ME, ME + 1).close()
    copy = tmp_path / "copy"  # as `cp -a` of a state directory leaves it: same owner, other name
    copy.mkdir()
    with pytest.raises(UidsUnavailable, match=f"uid {ME}, which owns {copy}, is in use by or reserved for"):
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
    leases = [books.any(500, 501) for _ in range(2)]
    assert {lease.uid for lease in leases} == {500, 501}
    for lease in leases:
        lease.close()


def test_reservations_are_the_runners_alone(books: Books, own_directory: Path) -> None:
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


def test_what_is_stale_is_swept(books: Books, own_directory: Path) -> None:
    books.reserve(501, "/nonexistent/gone")
    books.reserve(502, "")
    lease = books.state(own_directory, ME, 600, 610)
    assert set(books.reserved()) == {lease.uid}
    lease.close()
