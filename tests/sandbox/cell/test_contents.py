"""Files that exist only in memory, and the scratch folder: in a real cage, as root and as a user."""

from __future__ import annotations

import fcntl
import os
import pickle
from typing import Any

import pytest

from sandbox.cell import contents
from sandbox.cell.contents import Contents, read_contents
from sandbox.spec import MemoryFile
from tests import elsewhere
from tests.conftest import Caller
from tests.sandbox import cages

SECRET = "s3cret-of-the-test-0123456789"
SCRATCH = "/box/scratch/1"
FILES = [["/box/secrets/key", 0o400, "key"], [f"{SCRATCH}/big", 0o400, ""]]
GIVEN = [{"key": SECRET}, {f"{SCRATCH}/big": "artifact"}]
MEMORY: dict[str, Any] = {"scratch": SCRATCH, "memory_files": FILES, "contents": GIVEN}


# --- the value ---------------------------------------------------------------------------------------------


def test_through_another_process() -> None:
    given = Contents({"a": b"\0\n\xff", "b": b""}, {"/box/x": b"{}\n"})
    found = read_contents(given.share())
    assert (found.secrets, found.files) == (given.secrets, given.files)
    assert not read_contents(Contents().share())


def test_nobody_can_change_what_is_shared() -> None:
    fd = Contents({"a": b"value"}).share()
    try:
        with pytest.raises(PermissionError):
            os.write(fd, b"x")
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    finally:
        os.close(fd)


def test_what_is_cut_short_is_refused() -> None:
    fd = os.memfd_create("cut")
    os.write(fd, b'[{"a": 9}, {}]\nshort')
    with pytest.raises(ValueError, match="cut short"):
        read_contents(fd)


def test_it_shows_and_stores_nothing() -> None:
    given = Contents({"a": SECRET.encode()}, {"/x": SECRET.encode()})
    assert SECRET not in f"{given!r} {given}"
    with pytest.raises(TypeError):
        pickle.dumps(given)


def test_its_size_is_bounded() -> None:
    Contents({"a": bytes(contents.MOST_SECRET_BYTES)}, {"/x": bytes(contents.MOST_FILE_BYTES)})
    with pytest.raises(ValueError, match="the secrets are more than 1 MiB"):
        Contents({"a": bytes(contents.MOST_SECRET_BYTES), "b": b"x"})
    with pytest.raises(ValueError, match="the files in memory are more than 64 MiB"):
        Contents(files={"/x": bytes(contents.MOST_FILE_BYTES + 1)})


def test_strays() -> None:
    files = (MemoryFile("/a", secret="key"), MemoryFile("/b"))
    assert Contents({"key": b"", "other": b""}, {"/b": b"", "/c": b""}).strays(files) == ["other", "/c"]
    assert Contents({"key": b"1"}, {"/b": b"2"}).of(files[0]) == b"1"
    assert Contents({"/b": b"1"}, {"key": b"2"}).of(files[0]) is None


# --- in a cage ---------------------------------------------------------------------------------------------


def run(caller: Caller, script: str, **more: Any) -> str:
    asked = cages.request("/usr/bin/python3", "-I", "-c", script)
    return str(cages.run(caller, asked, **{**MEMORY, **more})["output"])


LOOK = """
import os
for path in ("/box/secrets/key", "/box/scratch/1/big", "/box/scratch/1"):
    held = os.stat(path)
    print(oct(held.st_mode), held.st_uid == os.getuid() == 65534)
print(open("/box/secrets/key").read(), open("/box/scratch/1/big").read())
print(sorted(os.listdir("/proc/self/fd")))
print(os.environ)
open_files = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        open_files += [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError as error:
        open_files.append(error.strerror)
print(len(open_files) > 3, [name for name in open_files if "memfd:runner-contents" in name])
"""

TAMPER = """
import os
def attempt(what, *words):
    try:
        what(*words)
    except OSError as error:
        print(error.strerror)
    else:
        print("done")
key = "/box/secrets/key"
attempt(open, key, "w")
attempt(os.chmod, key, 0o600)
attempt(os.unlink, key)
attempt(os.rename, key, "/box/secrets/other")
attempt(os.symlink, "/etc/passwd", "/box/secrets/new")
attempt(os.mkdir, "/box/other")
attempt(open, "/box/scratch/1/new", "w")
attempt(os.unlink, "/box/scratch/1/big")
"""


@pytest.mark.usefixtures("nothing_left")
def test_the_plugin_reads_and_cannot_change_them(runner_as: Caller) -> None:
    lines = run(runner_as, LOOK).splitlines()
    assert lines[:3] == ["0o100400 True", "0o100400 True", "0o40700 True"]
    assert lines[3] == f"{SECRET} artifact"
    assert lines[4] == "['0', '1', '2', '3']"  # 3 is the folder that is listed
    assert SECRET not in lines[5]
    assert lines[6] == "True []"
    assert run(runner_as, TAMPER).splitlines() == [*["Read-only file system"] * 6, "done", "done"]


FILL = """
import errno, os
for folder in ("/box/scratch/1", "/tmp"):
    written = 0
    try:
        for number in range(8):
            with open(f"{folder}/{number}", "wb", buffering=0) as file:
                written += file.write(bytes(1 << 18))
    except OSError as error:
        print(errno.errorcode[error.errno], written)
    else:
        print("written")
for number in range(8):
    if os.path.exists(f"/box/scratch/1/{number}"):
        os.unlink(f"/box/scratch/1/{number}")
made = 0
try:
    while made < 4096:
        open(f"/box/scratch/1/{made}", "w").close()
        made += 1
except OSError as error:
    print(errno.errorcode[error.errno], made < 1024)
"""


@pytest.mark.usefixtures("nothing_left")
def test_the_scratch_folder_is_bounded(runner_as: Caller) -> None:
    full, control, files = run(runner_as, FILL, limits={"disk": 1 << 20}).splitlines()
    word, written = full.split()
    assert word == "ENOSPC" and 0 < int(written) < 1 << 20  # the memory file takes a page of it
    assert control == "written" and files == "ENOSPC True"


@pytest.mark.usefixtures("nothing_left")
def test_each_cage_has_its_own(runner_as: Caller) -> None:
    plant = f'import os; os.unlink("{SCRATCH}/big"); os.symlink("/tmp", "{SCRATCH}/big"); print("planted")'
    assert run(runner_as, plant) == "planted\n"
    look = f'import os; print(os.listdir("{SCRATCH}"), os.path.islink("{SCRATCH}/big"))'
    assert run(runner_as, look) == "['big'] False\n"
    assert not os.path.exists("/box")


def hidden(given: dict[str, Any], needle: list[int]) -> list[Any]:
    """Launch, and search every process of this caller for the secret while the plugin runs."""
    import os
    from contextlib import contextmanager

    read, write = os.pipe()
    saved = os.dup(1)
    os.dup2(write, 1)
    os.dup2(os.pipe()[0], 0)  # the plugin waits for it
    try:
        with contextmanager(cage)(given) as cell:
            os.dup2(saved, 1)
            os.close(write)
            ready = os.read(read, 64).decode()
            wanted, found, memfds, seen = bytes(needle), [], [], 0
            for pid in filter(str.isdigit, os.listdir("/proc")):
                for name in ("cmdline", "environ"):
                    try:
                        with open(f"/proc/{pid}/{name}", "rb") as file:
                            seen += 1
                            if wanted in file.read():
                                found.append([pid, name])
                    except OSError:
                        continue
                try:
                    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
                except OSError:
                    continue
                memfds += [[pid, link] for link in links if "runner-contents" in link]
            rights: list[str] = []
            for pid in cell.processes() if os.geteuid() == 0 else ():
                try:
                    os.seteuid(0)
                    own = os.path.exists(f"/proc/{pid}/root/box/secrets/key")
                    os.seteuid(65534)
                    rights.append("open" if os.path.exists(f"/proc/{pid}/root/box") else "closed")
                    rights += ["seen by root"] if own else []
                finally:
                    os.seteuid(0)
            return [ready, found, memfds, seen > 2, rights]
    finally:
        os.dup2(saved, 1)


cage = cages.cage


@pytest.mark.machine  # it looks at all processes: another test may have files in memory just now
@pytest.mark.usefixtures("nothing_left")
def test_the_secret_is_in_no_argument_variable_or_open_file(runner_as: Caller) -> None:
    script = 'print(open("/box/secrets/key").read() == "' + SECRET[::-1] + '"[::-1], flush=True); input()'
    asked = cages.request("/usr/bin/python3", "-I", "-c", script)
    # The order is on the command line of the process that launches: so the secret is spelled in numbers.
    given = cages.order(asked, **{**MEMORY, "contents": [{}, {f"{SCRATCH}/big": "x"}]})
    found = elsewhere.run(runner_as, hide_and_seek, given, list(SECRET.encode()), using=(cage, hidden))
    ready, leaks, memfds, looked, rights = found
    assert ready == "True\n" and looked
    assert (leaks, memfds) == ([], [])
    if runner_as.uid == 0:
        assert set(rights) == {"closed", "seen by root"}  # root's own look is the control


def hide_and_seek(given: dict[str, Any], needle: list[int]) -> list[Any]:
    given["contents"][0]["key"] = bytes(needle).decode()
    return hidden(given, needle)


def test_wiped_contents_are_gone_also_for_others_that_refer_to_them() -> None:
    secret, short, file = b"secret-" + str(id(object)).encode(), b"x", b"content"
    before = len(secret)
    contents = Contents({"key": secret, "short": short}, {"/etc/x": file})
    contents.wipe()
    assert not contents
    assert secret == bytes(before)
    assert short == b"x"
