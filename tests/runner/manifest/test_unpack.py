"""A package in a tar: unpacked once, by its digest; what is not a package in a folder is refused."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.manifest import unpack as module
from runner.manifest.load import find, load, load_all
from runner.manifest.unpack import unpack
from sandbox.document.diagnostic import DocumentError
from tests.conftest import ROOT
from tests.tables import check_rows

Add = Callable[[tarfile.TarFile], None]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packages are unpacked."""
    folder = tmp_path / "state"
    monkeypatch.setattr(module, "state_root", lambda environ: str(folder / "plugins"))
    return folder / "unpacked"


def member(
    name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, mode: int = 0o644, link: str = ""
) -> Add:
    def add(tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.type, info.mode, info.linkname = len(data), kind, mode, link
        tar.addfile(info, io.BytesIO(data))

    return add


def write(path: Path, *members: Add) -> str:
    with tarfile.open(path, "w") as tar:
        for add in members:
            add(tar)
    return str(path)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else []


@pytest.mark.parametrize("ending", ["tar", "tar.gz", "tgz"])
def test_a_tar_of_the_layout(tmp_path: Path, place: Path, ending: str) -> None:
    devkit = ROOT / "tests/plugins/vai_devkit"
    path = tmp_path / f"devkit.{ending}"
    with tarfile.open(path, "w" if ending == "tar" else "w:gz") as tar:
        tar.add(devkit, ".", filter=lambda info: info if "__pycache__" not in info.name else None)
    found = find(str(path))
    folder = Path(found.path).parent
    assert (folder.parent, found.contract) == (place, "vai")
    read = load(str(path))
    assert read.plugin is not None and (read.plugin.id, read.plugin.root) == ("acme/devkit", str(folder))
    for name in ("bin/plugin", "vai-plugin.toml", "schemas/any.json", "assets/note.txt"):
        assert (folder / name).read_bytes() == (devkit / name).read_bytes()
    assert (folder / "bin/plugin").stat().st_mode & 0o777 == 0o755
    assert (folder / "assets/note.txt").stat().st_mode & 0o777 == 0o644
    assert folder.stat().st_mode & 0o777 == 0o755
    # The second time it is found by its digest. Other bytes have another.
    before = folder.stat().st_ino
    assert unpack(str(path)) == str(folder) and folder.stat().st_ino == before
    other = unpack(write(tmp_path / "other.tar", member("vai-plugin.toml", b"x")))
    assert other != str(folder) and sorted(os.listdir(place)) == sorted(
        [folder.name, os.path.basename(other)]
    )
    with pytest.raises(DocumentError) as caught:
        find(str(path), "nexo")
    assert "plugins of nexo are not read from a tar" in caught.value.diagnostics[0].message


def bomb(path: Path) -> str:
    """Few bytes that become many."""
    with tarfile.open(path, "w:gz") as tar:
        member("large", bytes(17 << 20))(tar)
    assert path.stat().st_size < 1 << 20
    return str(path)


def long_header(path: Path) -> str:
    """An extended header of 64 MiB, which tarfile reads as a whole."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 64 << 20
    path.write_bytes(info.tobuf(tarfile.USTAR_FORMAT) + bytes(4096))
    return str(path)


def chain(path: Path) -> str:
    """Extended headers one after the other, for each of which tarfile calls itself."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 512
    header = info.tobuf(tarfile.USTAR_FORMAT) + b"11 a=bcdef\n".ljust(512, b"\0")
    path.write_bytes(header * 1500)
    return str(path)


REFUSED: dict[str, tuple[tuple[Add, ...], str]] = {
    "above": ((member("../evil", b"x"),), "'../evil' is not a name in the package"),
    "above, later": ((member("a/../../evil", b"x"),), "is not a name in the package"),
    "absolute": ((member("/tmp/evil", b"x"),), "'/tmp/evil' is not a name in the package"),
    "a line break": ((member("a\nb", b"x"),), "is not a name in the package"),
    "a link": ((member("bin", kind=tarfile.SYMTYPE, link="/etc"),), "'bin' is neither a file nor a folder"),
    "through a link": (
        (member("bin", kind=tarfile.SYMTYPE, link="/etc"), member("bin/evil", b"x")),
        "neither a file nor a folder",
    ),
    "a hard link": ((member("a", b"x"), member("b", kind=tarfile.LNKTYPE, link="a")), "neither a file"),
    "a device": ((member("null", kind=tarfile.CHRTYPE),), "neither a file nor a folder"),
    "a FIFO": ((member("pipe", kind=tarfile.FIFOTYPE),), "neither a file nor a folder"),
    "a name twice": ((member("a", b"x"), member("a", b"y")), "'a' is there twice"),
    "a file as folder": ((member("a", b"x"), member("a/b", b"y")), "'a/b' is there twice, or is a file and"),
    "a folder as file": ((member("a/b", b"x"), member("a", b"y")), "'a' is there twice, or is a file and"),
    "too deep": ((member("/".join("x" * 33), b""),), "folders in each other"),
}


def test_a_refused_archive_leaves_nothing(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(name: str, row: tuple[tuple[Add, ...], str]) -> None:
        members, reason = row
        path = write(tmp_path / "bad.tar", member("good", b"1"), *members)
        with pytest.raises(DocumentError) as caught:
            unpack(path)
        [fault] = caught.value.diagnostics
        assert reason in fault.message and fault.rule == "package_tar" and fault.hint, name
        assert names(place) == []

    check_rows(REFUSED, check)
    assert names(tmp_path) == ["bad.tar", "state", "state/unpacked"]
    good = write(tmp_path / "good.tar", member("good", b"1"))  # the control
    assert names(Path(unpack(good))) == ["good"]
    shutil.rmtree(place)
    monkeypatch.setattr(module, "MOST_BYTES", 16 << 20)
    monkeypatch.setattr(module, "MOST_ENTRIES", 100)
    deep = write(tmp_path / "folders.tar", *(member(f"{n}/{'/'.join('x' * 29)}/y", b"") for n in range(4)))
    bad = (
        bomb(tmp_path / "bomb.tgz"),
        long_header(tmp_path / "long.tar"),
        chain(tmp_path / "chain.tar"),
        deep,
    )
    for path in bad:
        with pytest.raises(DocumentError):
            unpack(path)
        assert names(place) == []
    whole = Path(write(tmp_path / "good.tar", member("a", b"1"), member("b", b"2"))).read_bytes()
    damaged = whole[:1024] + b"x" + whole[1025:]
    cut = [whole[:size] for size in (0, 100, 512, 513, 1024, 1025, 1024 + 300, 2048, 2048 + 100)]
    for content in (*cut, damaged):
        (tmp_path / "cut.tar").write_bytes(content)
        with pytest.raises(DocumentError):
            unpack(str(tmp_path / "cut.tar"))
        assert names(place) == []
    (tmp_path / "cut.tar").write_bytes(whole[: 2048 + 512])  # the control: one block of the end is enough
    assert names(Path(unpack(str(tmp_path / "cut.tar")))) == ["a", "b"]


def test_headers_that_keep_tarfile_busy_are_refused(tmp_path: Path, place: Path) -> None:
    """tarfile takes minutes for a few MiB of these, and nothing interrupts it."""

    def header(kind: bytes, data: bytes) -> bytes:
        made = tarfile.TarInfo("x")
        made.type, made.size = kind, len(data)
        return made.tobuf() + data + bytes(-len(data) % 512)

    def fields(count: int) -> bytes:
        return b"".join(b"12 k%05d=v\n" % number for number in range(count))

    sparse = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n21 GNU.sparse.name=a\n25 GNU.sparse.realsize=1\n"
    end = header(b"0", b"") + bytes(1024)
    bad = {
        "numbers of a sparse file": (
            header(b"x", sparse) + header(b"0", b"40000\n" + b"1\n" * 80_000) + end,
            "too long",
        ),
        "a long header": (header(b"x", b"70000 k=" + b"v" * 69_991 + b"\n") + end, "too long"),
        "fields of one file": (header(b"x", fields(100)) + end, "more than 64 header fields"),
        "fields of all files": (header(b"g", fields(100)) + end, "more than 64 header fields"),
    }

    def check(name: str, row: tuple[bytes, str]) -> None:
        (tmp_path / "bad.tgz").write_bytes(gzip.compress(row[0], 1))
        with pytest.raises(DocumentError, match=row[1]):
            unpack(str(tmp_path / "bad.tgz"))
        assert names(place) == []

    check_rows(bad, check)
    good = header(b"g", fields(5)) + header(b"x", fields(5)) + end
    (tmp_path / "good.tar").write_bytes(good)  # the control
    assert names(Path(unpack(str(tmp_path / "good.tar")))) == ["x"]


def test_all_of_it_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    named: list[int] = []  # how many were synced when it got its name
    fsync, rename = os.fsync, os.rename

    def note_sync(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        fsync(fd)

    def note_name(*names: Any, **folders: Any) -> None:
        named.append(len(synced))
        rename(*names, **folders)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_name)
    path = write(tmp_path / "good.tar", member("a", b"1"), member("b/c/d", b"2"))
    folder = Path(unpack(path))
    [count] = named
    assert set(synced[:count]) == {each.stat().st_ino for each in (folder, *folder.rglob("*"))}


def test_faults_name_the_tar(tmp_path: Path, place: Path) -> None:
    """Nobody knows the folder that it was unpacked to."""
    bad = write(tmp_path / "bad.tar", member("vai-plugin.toml", b"x = 1\n"))
    empty = write(tmp_path / "empty.tar", member("readme", b""))
    broken = write(tmp_path / "broken.tar", member("vai-plugin.toml", b"x ="))
    for tar in (bad, empty, broken):
        for read in (load(tar), *load_all(tar)):
            assert read.plugin is None and read.diagnostics
            for each in read.diagnostics:
                assert each.file.startswith(tar) and str(place) not in f"{each.message}{each.hint}"


def test_a_place_that_others_can_change_is_refused(tmp_path: Path, place: Path) -> None:
    path = write(tmp_path / "good.tar", member("good", b"1"))
    place.mkdir(parents=True)
    place.chmod(0o777)
    with pytest.raises(DocumentError):
        unpack(path)
    place.chmod(0o700)
    assert unpack(path)


def test_a_tar_in_many_compressed_parts(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 MB of empty parts took 13 s, in one reading that nothing ends."""
    raw = Path(write(tmp_path / "whole.tar", member("a", b"x" * 3000))).read_bytes()
    empty, path = gzip.compress(b""), tmp_path / "many.tar.gz"
    begun: list[None] = []
    begin = module.GunzipFile._begin_member

    def watched(inflated: module.GunzipFile) -> bool:
        begun.append(None)
        return begin(inflated)

    monkeypatch.setattr(module.GunzipFile, "_begin_member", watched)
    half = gzip.compress(raw[:700]) + empty * (module._MOST_GZIP_MEMBERS - 2)
    path.write_bytes(half + gzip.compress(raw[700:]) + bytes(100_000))
    assert names(Path(unpack(str(path)))) == ["a"]
    for parts in (half + empty + gzip.compress(raw[700:]), empty * 50_000):
        begun.clear()
        path.write_bytes(parts)
        with pytest.raises(DocumentError, match="more than 1000 gzip members"):
            unpack(str(path))
        assert len(begun) == module._MOST_GZIP_MEMBERS
    assert gzip.decompress(empty * 50_000) == b""  # the control: Python's own reader takes them all


@pytest.mark.parametrize("size", [1, 512, 100_000])
def test_what_is_compressed_is_read_as_python_does(size: int) -> None:
    data = os.urandom(1000) + bytes(300_000) + b"end"
    packed = gzip.compress(data[:1500]) + gzip.compress(b"") + gzip.compress(data[1500:])

    def read(raw: bytes) -> bytes:
        inflated, found = module.GunzipFile(io.BytesIO(raw)), b""
        while part := inflated.read(size):
            assert len(part) == min(size, len(data) - len(found))
            found += part
        return found

    assert read(packed) == read(packed + bytes(5)) == gzip.decompress(packed) == data
    for raw in (packed[:-1], packed + b"\0x", packed[:-8] + bytes(8), packed[:30]):
        with pytest.raises((EOFError, zlib.error)):
            read(raw)
