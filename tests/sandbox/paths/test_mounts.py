from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox.paths.mounts import (
    Inside,
    Mount,
    Mounts,
    ancestry,
    contains,
    inside,
    mount_id,
    parse_mountinfo,
    read_mounts,
)

TABLE = rb"""24 29 0:23 / /proc rw,relatime - proc proc rw
29 1 254:0 / / rw,relatime shared:1 master:2 - ext4 /dev/vda rw
40 29 254:0 /srv/data\040of\040mine /mnt/a\011b\134c ro,nosuid shared:7 - ext4 /dev/vda rw
41 40 0:44 / /mnt/a\011b\134c/deep rw - tmpfs none rw
42 29 0:4 net:[4026531840] /opt/netns rw - nsfs nsfs rw
"""


def table() -> Mounts:
    return parse_mountinfo(TABLE)


def by_id(number: int) -> Mount:
    return next(mount for mount in table().all if mount.id == number)


def test_fields_and_octal_escapes() -> None:
    assert by_id(40) == Mount(
        id=40,
        parent=29,
        device="254:0",
        root="/srv/data of mine",
        point="/mnt/a\tb\\c",
        fstype="ext4",
        source="/dev/vda",
        writable=False,
        options="rw",
    )


def test_names_that_are_not_utf8_survive() -> None:
    (mount,) = parse_mountinfo(b"1 1 0:1 / /\xff\\040x rw - tmpfs none rw\n").all
    assert os.fsencode(mount.point) == b"/\xff x"


@pytest.mark.parametrize(
    "line", [b"1 2 3", b"x 1 0:1 / / rw - tmpfs none rw", b"1 1 0:1 / / rw tmpfs none rw"]
)
def test_a_line_of_another_shape_is_an_error_and_not_skipped(line: bytes) -> None:
    with pytest.raises(ValueError, match="mountinfo"):
        parse_mountinfo(TABLE + line + b"\n")


@pytest.mark.parametrize(
    ("path", "ids"),
    [
        ("/", [29]),
        ("/proc/self", [24, 29]),
        ("/processes", [29]),
        ("/mnt/a\tb\\c/deep/er", [41, 40, 29]),
    ],
)
def test_covering_mounts_innermost_first(path: str, ids: list[int]) -> None:
    assert [mount.id for mount in table().covering(path)] == ids


def test_mounts_below_do_not_include_the_place_itself() -> None:
    assert [mount.id for mount in table().below("/mnt")] == [40, 41]
    assert [mount.id for mount in table().below("/mnt/a\tb\\c")] == [41]
    assert table().below("/mnt/a\tb\\c/deep") == ()


def test_a_place_inside_its_filesystem() -> None:
    bind, root = by_id(40), by_id(29)
    assert (
        bind.inside("/mnt/a\tb\\c/x")
        == root.inside("/srv/data of mine/x")
        == ("254:0", "/srv/data of mine/x")
    )
    assert bind.inside("/mnt/a\tb\\c") == Inside("254:0", "/srv/data of mine")


@pytest.mark.parametrize(
    ("directory", "path", "answer"),
    [
        ("/a", "/a", True),
        ("/a", "/a/b", True),
        ("/a", "/ab", False),
        ("/", "/x", True),
        ("/a/b", "/a", False),
    ],
)
def test_contains(directory: str, path: str, answer: bool) -> None:
    assert contains(directory, path) is answer


def test_ancestry() -> None:
    assert list(ancestry("/a/b")) == ["/a/b", "/a", "/"]
    assert list(ancestry("/")) == ["/"]


def test_the_real_table_and_an_open_file(tmp_path: Path) -> None:
    mounts = read_mounts()
    fd = os.open(tmp_path, os.O_PATH | os.O_CLOEXEC)
    try:
        found = inside(fd, mounts)
        assert found is not None
        mount, place = found
        assert mount.id == mount_id(fd)
        assert place.path.endswith(os.path.realpath(tmp_path)[len(mount.point.rstrip("/")) :])
    finally:
        os.close(fd)


def test_procfs_is_known_as_such() -> None:
    fd = os.open("/proc/self", os.O_PATH | os.O_CLOEXEC)
    try:
        mount = read_mounts().of_fd(fd)
        assert mount is not None and mount.fstype == "proc"
    finally:
        os.close(fd)


def test_the_layers_of_an_overlay() -> None:
    raw = rb"""29 1 254:0 / / rw - ext4 /dev/vda rw
50 29 0:50 / /merged rw - overlay overlay rw,lowerdir=/a:/b\134:c\054d:relative,upperdir=/u\040v,workdir=/w
51 29 0:51 / /new rw - overlay overlay ro,lowerdir+=/x:y,lowerdir+=/z/,datadir+=/d
52 29 0:50 /sub /bound rw - overlay overlay rw,lowerdir=/a:/b\134:c\054d:relative,upperdir=/u\040v,workdir=/w
"""
    mounts = parse_mountinfo(raw)
    assert [mount.layers for mount in mounts.all[:2]] == [(), ("/a", "/b:c,d", "", "/u v")]
    assert mounts.all[2].layers == ("/x:y", "/z", "/d")
    bound = mounts.all[3]
    assert list(mounts.layer_paths(bound.inside("/bound/x"))) == ["/a/sub/x", "/b:c,d/sub/x", "/u v/sub/x"]
    assert list(mounts.layer_paths(mounts.all[0].inside("/etc"))) == []
    assert mounts.has_unknown_layer(bound.inside("/bound/x"))
    assert not mounts.has_unknown_layer(mounts.all[2].inside("/new")) and not mounts.has_unknown_layer(
        Inside("254:0", "/")
    )


def test_overlays_of_overlays() -> None:
    raw = b"""29 1 254:0 / / rw - ext4 /dev/vda rw
50 29 0:50 / /one rw - overlay overlay ro,lowerdir=/secret:/e
51 29 0:51 / /two rw - overlay overlay ro,lowerdir=/one/in:/e2
52 29 0:52 / /three rw - overlay overlay ro,lowerdir=/two:/three
53 29 0:53 / /odd rw - overlay overlay ro,lowerdir=/far:/three
54 29 0:54 / /far rw - overlay overlay ro,lowerdir=relative:/e
"""
    mounts = parse_mountinfo(raw)
    three = set(mounts.layer_paths(Inside("0:52", "/x")))
    assert three == {"/two/x", "/three/x", "/one/in/x", "/e2/x", "/secret/in/x", "/e/in/x"}
    assert not mounts.has_unknown_layer(Inside("0:52", "/x"))
    assert mounts.has_unknown_layer(Inside("0:53", "/x"))  # by a layer of a layer


def test_overlays_that_cover_their_own_layers() -> None:
    raw = b"""29 1 254:0 / / rw - ext4 /dev/vda rw
50 29 0:50 / /d rw - overlay overlay ro,lowerdir=/d/low:/other
51 29 0:51 / /a rw - overlay overlay ro,lowerdir=/b/low
52 29 0:52 / /b rw - overlay overlay ro,lowerdir=/a/low
"""
    mounts = parse_mountinfo(raw)
    assert set(mounts.layer_paths(Inside("0:50", "/x"))) == {"/d/low/x", "/other/x"}
    assert set(mounts.layer_paths(Inside("0:51", "/x"))) == {"/b/low/x", "/a/low/low/x"}
    assert not mounts.has_unknown_layer(Inside("0:50", "/x"))


def test_the_layers_of_a_containers_root_are_names_of_its_host() -> None:
    raw = (
        b"29 1 0:50 / / rw - overlay overlay rw,lowerdir=/root/images/l,upperdir=/root/images/u,workdir=/w\n"
    )
    mounts = parse_mountinfo(raw)
    assert list(mounts.layer_paths(Inside("0:50", "/etc"))) == []
