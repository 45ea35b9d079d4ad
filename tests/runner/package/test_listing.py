"""The list of files that a signature covers."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.package import listing
from runner.package.fault import PackageFault
from runner.package.listing import SIGNATURE_NAME, FileList, list_package


def _package(folder: Path, **files: str) -> Path:
    for name, text in {"manifest": "m", "bin/tool": "t", **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_the_list_is_sorted_by_bytes_and_has_all_files_but_the_signature(tmp_path: Path) -> None:
    package = _package(
        tmp_path, **{SIGNATURE_NAME: "s", f"bin/{SIGNATURE_NAME}": "x", "bin.txt": "b", "é": "e"}
    )
    (package / "empty").mkdir()
    names = [file.path for file in list_package(str(package)).files]
    assert names == ["bin.txt", f"bin/{SIGNATURE_NAME}", "bin/tool", "manifest", "é"]


def test_the_text_has_a_line_for_each_file(tmp_path: Path) -> None:
    found = list_package(str(_package(tmp_path)))
    assert found.text.decode() == f"{_sha256('t')}  bin/tool\n{_sha256('m')}  manifest\n"
    assert found.digest == "sha256:" + hashlib.sha256(found.text).hexdigest()
    assert found.size == 2


def test_the_digest_is_what_the_documented_command_prints(tmp_path: Path) -> None:
    package = _package(tmp_path, **{"a b/c": "1", "Z": "2", "z.txt": "3", SIGNATURE_NAME: "s"})
    command = (
        f"find . -type f ! -path ./{SIGNATURE_NAME} -printf '%P\\0' "
        "| LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum"
    )
    printed = subprocess.run(command, shell=True, cwd=package, capture_output=True, text=True, check=True)
    assert list_package(str(package)).digest == f"sha256:{printed.stdout.split()[0]}"


def _add(package: Path) -> None:
    (package / "new").write_text("")


def _rename(package: Path) -> None:
    (package / "bin/tool").rename(package / "bin/Tool")


def _move(package: Path) -> None:
    (package / "bin/tool").rename(package / "tool")


def _change(package: Path) -> None:
    (package / "bin/tool").write_text("T")


def _remove(package: Path) -> None:
    (package / "bin/tool").unlink()


def _exchange(package: Path) -> None:
    (package / "bin/tool").write_text("m")
    (package / "manifest").write_text("t")


@pytest.mark.parametrize("change", [_add, _rename, _move, _change, _remove, _exchange])
def test_every_change_changes_the_digest(tmp_path: Path, change: Callable[[Path], None]) -> None:
    package = _package(tmp_path)
    before = list_package(str(package)).digest
    assert list_package(str(package)).digest == before  # the control
    change(package)
    assert list_package(str(package)).digest != before


def test_modes_empty_folders_and_the_signature_do_not_change_the_digest(tmp_path: Path) -> None:
    package = _package(tmp_path)
    before = list_package(str(package)).digest
    (package / "bin/tool").chmod(0o755)
    (package / "empty").mkdir()
    (package / SIGNATURE_NAME).write_text("anything")
    assert list_package(str(package)).digest == before


def test_a_hard_link_counts_as_the_file_it_is(tmp_path: Path) -> None:
    package = _package(tmp_path)
    os.link(package / "manifest", package / "same")
    assert {file.path: file.sha256 for file in list_package(str(package)).files}["same"] == _sha256("m")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # the path of a socket is short
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda path: path.symlink_to("manifest"), "a symbolic link"),
        (lambda path: path.symlink_to("bin"), "a symbolic link"),
        (lambda path: os.mkfifo(path), "a FIFO"),
        (_socket, "a unix socket"),
    ],
)
def test_what_is_neither_file_nor_folder_is_refused(
    tmp_path: Path, make: Callable[[Path], None], kind: str
) -> None:
    package = _package(tmp_path)
    make(package / "bin/other")
    with pytest.raises(PackageFault, match=f"bin/other is {kind}") as refused:
        list_package(str(package))
    assert refused.value.rule == "package_kind" and refused.value.hint


def test_the_folder_itself_may_not_be_a_link(tmp_path: Path) -> None:
    package = _package(tmp_path / "real")
    (tmp_path / "link").symlink_to(package)
    with pytest.raises(PackageFault, match="cannot be read"):
        list_package(str(tmp_path / "link"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (b"a\nb", "control character"),
        (b"a\rb", "control character"),
        (b"a\x7fb", "control character"),
        ("a\x85b".encode(), "control character"),
        (b"a\xffb", "not UTF-8"),
        (b"folder\n/x", "control character"),
    ],
)
def test_a_name_that_could_forge_a_line_is_refused(tmp_path: Path, name: bytes, reason: str) -> None:
    package = _package(tmp_path)
    path = os.path.join(os.fsencode(package), name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb"):
        pass
    with pytest.raises(PackageFault, match=reason) as refused:
        list_package(str(package))
    assert refused.value.rule == "package_name"
    assert str(refused.value).isprintable()


def test_two_packages_cannot_have_the_same_text() -> None:
    """The list is read back: sha256, two spaces, a path without a line break."""
    line = f"{'0' * 64}  a"
    forged = listing.ListedFile(f"b\n{line}", "1" * 64, 0)
    assert listing.name_fault(forged.path) is not None
    assert FileList((forged,)).text.count(b"\n") == 2  # this is what it would do


@pytest.mark.parametrize(("most", "counts"), [("MOST_ENTRIES", 3), ("MOST_BYTES", 2), ("MOST_DEPTH", 1)])
def test_a_package_has_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: str, counts: int
) -> None:
    package = _package(tmp_path)  # 2 files of 1 byte, one folder
    monkeypatch.setattr(listing, most, counts)
    assert len(list_package(str(package)).files) == 2
    monkeypatch.setattr(listing, most, counts - 1)
    with pytest.raises(PackageFault) as refused:
        list_package(str(package))
    assert refused.value.rule == "package_size" and refused.value.hint


class _Meddler:
    """A sink that changes the file while it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done = False

    def open_file(self, path: str, mode: int, folder_modes: tuple[int, ...], size: int) -> None: ...

    def write(self, data: bytes) -> None:
        if not self.done:
            self.done = True
            with self.path.open("ab") as file:
                file.write(b"more")

    def close_file(self) -> None: ...


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest").write_text("m")
    with pytest.raises(PackageFault, match="changed while it was read") as refused:
        list_package(str(tmp_path), _Meddler(tmp_path / "manifest"))
    assert refused.value.rule == "package_changed"


def test_a_folder_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(PackageFault, match="cannot be read: No such file"):
        list_package(str(tmp_path / "missing"))
