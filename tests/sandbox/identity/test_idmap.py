"""Mounts in which one host uid appears as the plugin's."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandbox.identity import idmap
from sandbox.identity.idmap import FileOwner, IdmapUnavailable, idmapped_mount
from sandbox.paths.denylist import Denylist
from sandbox.paths.mounts import mount_id, read_mounts
from sandbox.paths.scan import MOST_STRANGERS
from sandbox.paths.source import open_source
from sandbox.seccomp import syscalls
from sandbox.spawn import init
from tests.conftest import SPARE_UID
from tests.tables import one_case

ALICE, PLUGIN = FileOwner(SPARE_UID + 27, SPARE_UID + 28), FileOwner(SPARE_UID + 29, SPARE_UID + 30)

needs_root = pytest.mark.needs("root")


@contextmanager
def mapped(source: int, owner: FileOwner = ALICE) -> Iterator[int]:
    try:
        fd = idmapped_mount(source, owner, PLUGIN)
    except IdmapUnavailable as refused:
        pytest.skip(f"needs idmapped mounts: {refused}")
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.fixture
def data(plugin_dir: Path) -> Path:
    path = plugin_dir / "data"
    path.mkdir()
    (path / "file").write_text("hers")
    for each in (path, path / "file"):
        os.chown(each, *ALICE)
    return path


@needs_root
def test_roots_files_are_mapped_only_where_nothing_can_be_written(plugin_dir: Path) -> None:
    fd, roots = os.open(plugin_dir, os.O_PATH), FileOwner(0, 0)
    with pytest.raises(ValueError, match="root is never mapped"):
        idmapped_mount(fd, roots, PLUGIN)
    try:
        tree = idmapped_mount(fd, roots, PLUGIN, read_only=True)
    except IdmapUnavailable as refused:
        pytest.skip(f"needs idmapped mounts: {refused}")
    finally:
        os.close(fd)
    status = os.fstatvfs(tree)
    assert (
        os.fstat(tree).st_uid == PLUGIN.uid and status.f_flag & os.ST_RDONLY and status.f_flag & os.ST_NOSUID
    )
    os.close(tree)


@needs_root
def test_only_the_owner_is_mapped_to_the_plugin(data: Path) -> None:
    for name, owner in (("roots", (0, 0)), ("groups", (ALICE.uid, 0)), ("others", (SPARE_UID, ALICE.gid))):
        (data / name).touch()
        os.chown(data / name, *owner)
    fd = os.open(data, os.O_PATH)
    with mapped(fd) as tree:
        found = {
            name: (status.st_uid, status.st_gid)
            for name in ("file", "roots", "groups", "others")
            for status in [os.stat(name, dir_fd=tree)]
        }
        # Nothing of it is to be seen on the host, where other tests have mounts that come and go.
        seen = {mount.id for mount in read_mounts().all}
        assert mount_id(fd) in seen and mount_id(tree) not in seen
    os.close(fd)
    nobody = 65534
    assert found == {
        "file": tuple(PLUGIN),
        "roots": (nobody, 0),
        "groups": (PLUGIN.uid, 0),  # and it is not in that group
        "others": (nobody, PLUGIN.gid),
    }


@needs_root
def test_the_opened_file_is_mounted(data: Path, plugin_dir: Path) -> None:
    """Even if its name changes between opening and mounting."""
    secret = plugin_dir / "secret"
    secret.mkdir()
    (secret / "key").touch()
    source = open_source(str(data), access="write", denylist=Denylist(read_mounts()))
    data.rename(plugin_dir / "moved")
    data.symlink_to(secret)
    with mapped(source.fd) as tree:
        assert os.stat("file", dir_fd=tree).st_uid == PLUGIN.uid
        with pytest.raises(FileNotFoundError):
            os.stat("key", dir_fd=tree)
    # The control: by its name it is the other one.
    fd = os.open(data, os.O_PATH)
    with mapped(fd) as tree:
        assert os.stat("key", dir_fd=tree).st_uid == 65534
    os.close(fd)
    source.close()


@needs_root
@one_case("owner", [FileOwner(0, 1), FileOwner(1, 0), FileOwner(0, 0)])
def test_root_is_never_mapped(data: Path, owner: FileOwner) -> None:
    fd = os.open(data, os.O_PATH)
    with pytest.raises(ValueError, match="root is never mapped"):
        idmapped_mount(fd, owner, PLUGIN)
    os.close(fd)


@needs_root
def test_a_filesystem_without_idmapped_mounts(nothing_left: None) -> None:
    fds = os.listdir("/proc/self/fd")
    fd = os.open("/proc", os.O_PATH)
    with pytest.raises(IdmapUnavailable) as refused:
        idmapped_mount(fd, ALICE, PLUGIN)
    os.close(fd)
    assert refused.value.errno and str(refused.value)
    assert os.listdir("/proc/self/fd") == fds


@needs_root
def test_other_threads_want_the_interpreter_lock(data: Path) -> None:
    """A child of the process with a line of Python to run would wait for one of its threads, for ever."""
    fd, interval, busy = os.open(data, os.O_PATH), sys.getswitchinterval(), True

    def spin() -> None:
        while busy:
            pass

    threads = [threading.Thread(target=spin) for _ in range(2)]
    sys.setswitchinterval(1e-6)
    for each in threads:
        each.start()
    try:
        for _ in range(20):
            with mapped(fd):
                pass
    finally:
        busy = False
        for each in threads:
            each.join()
        sys.setswitchinterval(interval)
        os.close(fd)


@pytest.mark.parametrize("arch", ["aarch64", "x86_64"])
def test_numbers_are_those_of_the_tables(arch: str) -> None:
    table = syscalls.load(arch)
    numbers = idmap._SYSCALLS[arch]
    assert numbers._asdict() == {name: table[name] for name in numbers._fields}
    assert table["move_mount"] == init._MOVE_MOUNT


def test_groups_stay_the_same(tmp_path: Path) -> None:
    table = tmp_path / "gid_map"
    for text, expected in (
        ("0 0 4294967295\n", ["5 9 1", "0 0 5", "6 6 3", "10 10 4294967285"]),
        ("0 100000 65536\n", ["5 9 1", "0 0 5", "6 6 3", "10 10 65526"]),
        ("0 1 6\n100 7 1\n", ["5 9 1", "0 0 5", "100 100 1"]),
    ):
        table.write_text(text)
        assert [line.strip() for line in idmap._groups(5, 9, str(table))] == expected


@needs_root
def test_at_most_eight_other_owners_are_listed(data: Path) -> None:
    (data / "deep/er").mkdir(parents=True)
    for number in range(MOST_STRANGERS + 4):
        path = data / "deep/er" / str(number)
        path.touch()
        os.chown(path, SPARE_UID + number, -1)
    denylist = Denylist(read_mounts())
    source = open_source(str(data), access="write", denylist=denylist)
    source.close()
    assert source.uid == ALICE.uid and len(source.strangers) == MOST_STRANGERS
    assert dict(source.strangers)[0] == "deep"  # root's, who made it
    # Nobody asks who owns what is only read.
    source = open_source(str(data), access="read", denylist=denylist)
    source.close()
    assert source.strangers == ()
