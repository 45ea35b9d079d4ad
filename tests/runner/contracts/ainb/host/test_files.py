"""host/fs/*: the path guard, with attacks and their controls."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from runner.contracts.ainb.declared import READ_ROOTS, Declared
from runner.contracts.ainb.host import files
from runner.contracts.ainb.host.files import FILE_MOST_BYTES, GuardedFiles, common_roots
from runner.contracts.ainb.payload import decode
from runner.plugin import Allowance
from tests.runner.contracts.ainb.host.desk import Desk

READ, LIST = "host/fs/read_file", "host/fs/read_dir"


@pytest.fixture(autouse=True)
def _close_roots() -> Iterator[None]:
    """They are closed with the desk, and other tests count what is open."""
    yield
    gc.collect()


@pytest.fixture
def grant(tmp_path: Path) -> Path:
    folder = tmp_path / "grant"
    (folder / "sub").mkdir(parents=True)
    (folder / "file").write_text("inside")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "grant-evil").mkdir()
    (tmp_path / "grant-evil" / "file").write_text("secret")
    return folder


def desk_for(
    *roots: Path | str,
    readable: tuple[Path | str, ...] | None = None,
    writable: tuple[Path | str, ...] = (),
    denied: tuple[str, ...] = (),
) -> Desk:
    paths = tuple(map(str, roots))
    granted = paths if readable is None else tuple(map(str, readable))
    declared = Declared(granted=("read_paths",), fs_roots=paths)
    return Desk(
        declared=declared,
        allowance=Allowance(readable=granted, writable=tuple(map(str, writable)), denied=denied),
    )


async def read(desk: Desk, path: Path | str) -> bytes:
    return decode((await desk.result(READ, {"path": str(path)}))["bytes"])


async def listing(desk: Desk, path: Path | str) -> dict[str, tuple[bool, int]]:
    entries = (await desk.result(LIST, {"path": str(path)}))["entries"]
    return {each["name"]: (each["is_dir"], each["size"]) for each in entries}


def outside(path: Path | str) -> tuple[int, str, Any]:
    return -32001, f"capability denied: read_paths: {path} is outside the granted envelope", None


# --- which folders ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "granted", "roots"),
    [
        (["/a"], ["/a"], ("/a",)),
        (["/a/b"], ["/a"], ("/a/b",)),
        (["/a"], ["/a/b", "/a/c"], ("/a/b", "/a/c")),
        (["/a"], ["/ab", "/"], ("/a",)),
        (["/a"], ["/ab"], ()),
        (["/a"], [], ()),
        ([], ["/a"], ()),
        (["/a/", "/a"], ["/a/."], ("/a",)),
    ],
)
def test_roots_are_what_the_manifest_asks_and_the_policy_granted(
    declared: list[str], granted: list[str], roots: tuple[str, ...]
) -> None:
    assert common_roots(declared, granted) == roots


@pytest.mark.trio
async def test_what_the_policy_did_not_grant_is_not_read(grant: Path) -> None:
    code, message, _ = await desk_for(grant, readable=()).error(READ, {"path": f"{grant}/file"})
    assert (code, message) == (-32001, "capability denied: read_paths (no path-scoped fs read granted)")
    desk = desk_for(grant, readable=(grant / "sub",))
    assert await desk.error(READ, {"path": f"{grant}/file"}) == outside(f"{grant}/file")
    (grant / "sub" / "x").write_text("x")
    assert await read(desk, grant / "sub" / "x") == b"x"


def make_log(folder: str) -> Path:
    Path(folder).mkdir(parents=True)
    Path(folder, "log").write_text("x")
    return Path(folder)


@pytest.mark.trio
async def test_a_denied_read_names_the_capability_that_is_missing(grant: Path) -> None:
    """Of the folders that a flag is for, that flag; elsewhere read_paths."""
    roots = tuple(f"{grant}/{folder}" for folder in READ_ROOTS.values())
    logs = make_log(roots[1])
    for flags, readable in (((), (str(grant / "sub"),)), (("read_claude_logs",), (str(logs),)), ((), ())):
        declared = Declared(granted=("read_paths", *flags), fs_roots=readable, flag_roots=roots)
        desk = Desk(declared=declared, allowance=Allowance(readable=readable))
        for flag, root in zip(READ_ROOTS, roots, strict=True):
            for method in (READ, LIST):
                if flag not in flags:
                    error = await desk.error(method, {"path": f"{root}/x/../log"})
                    assert error == (-32001, f"capability denied: {flag}", None)
        if flags:
            assert await read(desk, logs / "log") == b"x"
        _, message, _ = await desk.error(READ, {"path": f"{grant}/.claude/other"})
        assert message.startswith("capability denied: read_paths")


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_files_are_read(grant: Path) -> None:
    desk = desk_for(grant)
    (grant / "empty").write_bytes(b"")
    (grant / "bytes").write_bytes(bytes(range(256)))
    assert await read(desk, grant / "file") == b"inside"
    assert await read(desk, grant / "empty") == b""
    assert await read(desk, grant / "bytes") == bytes(range(256))
    assert await read(desk, f"{grant}/./sub/..//file") == b"inside"
    assert await read(desk, f"{grant}/missing/../file") == b"inside"  # collapsed by name first


@pytest.mark.trio
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing", "No such file or directory (os error 2)"),
        ("missing/deeper", "No such file or directory (os error 2)"),
        ("file/x", "Not a directory (os error 20)"),
        ("sub", "Is a directory (os error 21)"),
        ("dangling", "No such file or directory (os error 2)"),
        ("loop", "Too many levels of symbolic links (os error 40)"),
    ],
)
async def test_errors_of_the_system_are_told(grant: Path, name: str, reason: str) -> None:
    (grant / "dangling").symlink_to("nothing")
    (grant / "loop").symlink_to("loop")
    error = await desk_for(grant).error(READ, {"path": f"{grant}/{name}"})
    assert error == (-32602, f"read {grant}/{name}: {reason}", None)


@pytest.mark.trio
@pytest.mark.parametrize("path", ["file", "", "./file", "~/file", "/a\0b", "/" + "a" * 4095])
async def test_a_path_must_be_absolute_and_of_a_length(grant: Path, path: str) -> None:
    code, message, _ = await desk_for(grant).error(READ, {"path": path})
    assert code == -32602 and message.startswith("invalid params: path is ")


@pytest.mark.trio
async def test_names_that_lead_out_are_refused(grant: Path) -> None:
    desk = desk_for(grant)
    for path in (
        f"{grant}/../secret",
        f"{grant}/sub/../../secret",
        f"{grant}-evil/file",
        f"{grant.parent}/secret",
        "/etc/passwd",
        "/proc/self/root/etc/passwd",
        f"{grant}/../../../../../../../etc/passwd",
        "/",
    ):
        for method in (READ, LIST):
            assert await desk.error(method, {"path": path}) == outside(path)
    assert await read(desk, f"{grant}/file") == b"inside"  # the control


@pytest.mark.trio
async def test_links_are_followed_inside_only(grant: Path) -> None:
    desk = desk_for(grant)
    links = {
        "inside": "file",
        "inside_absolute": f"{grant}/file",
        "out": "../secret",
        "out_absolute": f"{grant.parent}/secret",
        "out_evil": f"{grant}-evil/file",
        "magic": "/proc/self/root",
        "parent": "..",
    }
    for name, target in links.items():
        (grant / name).symlink_to(target)
    assert await read(desk, grant / "inside") == await read(desk, grant / "inside_absolute") == b"inside"
    for name in ("out", "out_absolute", "out_evil", "magic", "magic/etc/passwd", "parent/secret"):
        assert await desk.error(READ, {"path": f"{grant}/{name}"}) == outside(f"{grant}/{name}")
    assert (grant / "out").read_text() == "secret"  # the control


@pytest.mark.trio
async def test_a_granted_link_of_roots_works_under_both_names() -> None:
    try:
        real = os.path.join("/", os.readlink("/bin"))
    except OSError:
        pytest.skip("/bin is no link")
    desk = desk_for("/bin")
    for path in ("/bin", real):
        assert "sh" in await listing(desk, path)
        error = await desk.error(READ, {"path": f"{path}/missing"})
        assert error == (-32602, f"read {path}/missing: No such file or directory (os error 2)", None)
    assert await desk.error(READ, {"path": "/bin/../etc/passwd"}) == outside("/bin/../etc/passwd")


@pytest.mark.trio
async def test_a_granted_link_of_others_is_not_followed(grant: Path) -> None:
    link = grant.parent / "link"
    link.symlink_to(grant)
    desk = desk_for(link, grant / "sub")
    for path in (f"{link}/file", f"{grant}/file"):
        assert await desk.error(READ, {"path": path}) == outside(path)
    assert await read(desk_for(link, grant), grant / "file") == b"inside"  # the control


@pytest.mark.trio
async def test_what_a_plugin_can_change_is_no_root(tmp_path: Path, grant: Path) -> None:
    """It would put a link to / in the place of its root."""
    state = tmp_path / "state"
    (state / "sub").mkdir(parents=True)
    (state / "sub" / "x").write_text("x")
    other = tmp_path / "other"
    other.symlink_to(state)
    for writable in ((state,), (state / "sub",), (state / "sub" / "deep",), (other,), (other / "sub",)):
        desk = desk_for(state / "sub", grant, writable=writable)
        for path in (f"{state}/sub/x", f"{state}/sub"):
            assert await desk.error(READ, {"path": path}) == outside(path), writable
        assert await read(desk, grant / "file") == b"inside"
    # The control: it is read as long as the plugin cannot change it.
    for near in ("state-evil", "state/su"):
        assert await read(desk_for(state / "sub", writable=(tmp_path / near,)), state / "sub" / "x") == b"x"


@pytest.mark.trio
async def test_a_root_that_becomes_a_link_leads_nowhere_else(tmp_path: Path, grant: Path) -> None:
    desk = desk_for(grant)
    os.rename(grant, tmp_path / "aside")
    os.symlink(tmp_path, grant)
    error = await desk.error(READ, {"path": f"{grant}/secret"})
    assert error == (-32602, f"read {grant}/secret: No such file or directory (os error 2)", None)
    assert (grant / "secret").read_text() == "secret"  # the control: by name it is reached
    assert await read(desk, grant / "file") == b"inside"  # what was opened stays what it was


@pytest.mark.trio
async def test_a_root_that_is_a_link_already_is_not_offered(tmp_path: Path, grant: Path) -> None:
    root = grant / "sub"
    root.rmdir()
    root.symlink_to("/etc")
    for path in (f"{root}/passwd", "/etc/passwd"):
        assert await desk_for(root, tmp_path / "grant-evil").error(READ, {"path": path}) == outside(path)
    assert (root / "passwd").exists()  # the control


@pytest.mark.trio
async def test_files_of_the_kernel_are_not_read(grant: Path) -> None:
    desk = desk_for("/proc/self", f"/proc/{os.getpid()}", "/sys/kernel", grant)
    for path in (f"/proc/{os.getpid()}/environ", "/proc/self/status", "/sys/kernel/notes", "/sys/kernel"):
        assert await desk.error(READ, {"path": path}) == outside(path)
    assert await read(desk, grant / "file") == b"inside"  # the control


@pytest.mark.trio
async def test_a_granted_file(grant: Path) -> None:
    desk = desk_for(grant / "file")
    assert await read(desk, grant / "file") == b"inside"
    assert await desk.error(READ, {"path": f"{grant}/sub"}) == outside(f"{grant}/sub")
    assert (await desk.error(READ, {"path": f"{grant}/file/x"}))[0] == -32602


@pytest.mark.trio
async def test_a_granted_folder_that_is_missing(tmp_path: Path, grant: Path) -> None:
    desk = desk_for(tmp_path / "nothing", grant)
    assert await desk.error(READ, {"path": f"{tmp_path}/nothing/x"}) == outside(f"{tmp_path}/nothing/x")
    assert await read(desk, grant / "file") == b"inside"


@pytest.mark.trio
async def test_hard_links_are_files_like_others_but_not_to_denied_files(grant: Path) -> None:
    os.link(grant.parent / "secret", grant / "linked")
    assert await read(desk_for(grant), grant / "linked") == b"secret"


@pytest.mark.trio
async def test_the_denylist_holds_below_a_granted_folder(
    grant: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grant is judged when the plugin is launched. This is for what appears there later."""
    monkeypatch.setenv("HOME", str(grant))
    for name in (".ssh/id", "ssh/id", ".netrc"):
        (grant / name).parent.mkdir(exist_ok=True)
        (grant / name).write_text("key")
    (grant / "link").symlink_to(".ssh/id")
    os.link(grant / ".netrc", grant / "linked")
    desk = desk_for(grant / "ssh", grant)
    for name in (".ssh/id", ".ssh/missing/../id", "link", ".netrc", "linked"):
        assert await desk.error(READ, {"path": f"{grant}/{name}"}) == outside(f"{grant}/{name}")
    assert await desk.error(LIST, {"path": f"{grant}/.ssh"}) == outside(f"{grant}/.ssh")
    assert await read(desk, grant / "ssh" / "id") == b"key"  # the control


@pytest.mark.trio
async def test_what_the_policy_denies_is_not_read(grant: Path) -> None:
    (grant / "sub" / "x").write_text("x")
    (grant / "link").symlink_to("sub/x")
    desk = desk_for(grant, denied=(f"{grant}/sub",))
    for name in ("sub/x", "link", "sub/missing/../x"):
        assert await desk.error(READ, {"path": f"{grant}/{name}"}) == outside(f"{grant}/{name}")
    assert await desk.error(LIST, {"path": f"{grant}/sub"}) == outside(f"{grant}/sub")
    assert await read(desk, grant / "file") == b"inside"
    assert await read(desk_for(grant), grant / "sub" / "x") == b"x"  # the control


@pytest.mark.trio
async def test_only_regular_files_are_opened(grant: Path) -> None:
    """Opening a FIFO would block, and opening a device can do anything."""
    os.mkfifo(grant / "fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.open(grant, os.O_PATH)
        bound.bind(f"/proc/self/fd/{here}/socket")
        os.close(here)
        (grant / "null").symlink_to("/dev/null")
        desk = desk_for(grant, "/dev")
        with trio.fail_after(60):
            for path in (grant / "fifo", grant / "socket", "/dev/null"):
                error = await desk.error(READ, {"path": str(path)})
                assert error == (-32602, f"read {path}: it is not a regular file", None)


@pytest.mark.trio
async def test_a_file_has_a_largest_size(grant: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (grant / "huge").open("wb") as file:
        file.truncate(1 << 40)  # without a block on the disk
    desk = desk_for(grant)
    error = await desk.error(READ, {"path": f"{grant}/huge"})
    assert error[1] == f"read {grant}/huge: it has {1 << 40} bytes, and the most is {FILE_MOST_BYTES}"
    monkeypatch.setattr(files, "FILE_MOST_BYTES", 6)
    assert await read(desk, grant / "file") == b"inside"
    (grant / "file").write_text("inside+")
    assert (await desk.error(READ, {"path": f"{grant}/file"}))[0] == -32602


@pytest.mark.trio
async def test_a_file_without_a_size_is_read_to_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_kernel_devices", set)
    desk = desk_for(f"/proc/{os.getpid()}")
    real = f"/proc/{os.getpid()}/status"
    assert b"Pid:" in await read(desk, real)  # the control: it has no size
    monkeypatch.setattr(files, "FILE_MOST_BYTES", 100)
    error = await desk.error(READ, {"path": real})
    assert error == (-32602, f"read {real}: it has more than 100 bytes", None)


# --- directories --------------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_directories_are_listed_without_following_links(grant: Path) -> None:
    (grant / "to_sub").symlink_to("sub")
    (grant / "out").symlink_to("/etc")
    os.mkfifo(grant / "fifo")
    found = await listing(desk_for(grant), grant)
    assert found == {
        "file": (False, 6),
        "sub": (True, 0),
        "to_sub": (False, 3),
        "out": (False, 4),
        "fifo": (False, 0),
    }
    assert await listing(desk_for(grant), grant / "to_sub") == {}


@pytest.mark.trio
async def test_errors_of_a_listing(grant: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = desk_for(grant)
    for name, reason in (
        ("missing", "No such file or directory (os error 2)"),
        ("file", "Not a directory (os error 20)"),
    ):
        error = await desk.error(LIST, {"path": f"{grant}/{name}"})
        assert error == (-32602, f"read_dir {grant}/{name}: {reason}", None)
    monkeypatch.setattr(files, "ENTRIES_MOST", 2)
    assert len(await listing(desk, grant)) == 2
    (grant / "third").write_text("")
    error = await desk.error(LIST, {"path": str(grant)})
    assert error == (-32602, f"read_dir {grant}: it has more than 2 entries", None)


@pytest.mark.trio
async def test_a_name_that_is_not_utf8_is_shown_with_replacements(grant: Path) -> None:
    (grant / "sub" / os.fsdecode(b"\xff")).write_text("")
    assert await listing(desk_for(grant), grant / "sub") == {"\ufffd": (False, 0)}


# --- rights and races ---------------------------------------------------------------------------------------


@pytest.mark.trio
@pytest.mark.needs("root")
async def test_root_reads_only_what_a_stranger_may(grant: Path) -> None:
    """No more than the plugin sees in its cage, where it has a uid of its own, whoever owns the folder."""
    for name, mode, owner in (
        *(("mine", 0o400, 12345), ("roots", 0o600, 0), ("shown", 0o604, 0), ("other", 0o600, 54321)),
        *(("sub/hidden", 0o644, 54321), ("shut", 0o000, 12345)),
    ):
        (grant / name).write_text(name)
        os.chmod(grant / name, mode)
        os.chown(grant / name, owner, owner)
    os.chown(grant / "sub", 54321, 54321)
    os.chmod(grant / "sub", 0o700)
    desk = desk_for(grant)
    refused = {"mine", "roots", "other", "sub/hidden", "shut"}
    for owner in (0, 12345):
        os.chown(grant, owner, owner)
        for name in ("mine", "roots", "shown", "other", "sub/hidden", "shut"):
            path = f"{grant}/{name}"
            if name in refused:
                error = await desk.error(READ, {"path": path})
                assert error == (-32602, f"read {path}: Permission denied (os error 13)", None), owner
            else:
                assert await read(desk, path) == name.encode()
        assert (await desk.error(LIST, {"path": f"{grant}/sub"}))[0] == -32602
        assert set(await listing(desk, grant)) == {"file", "sub", "mine", "roots", "shown", "other", "shut"}
    assert (grant / "other").read_text() == "other"  # the control: root itself may


@pytest.mark.trio
@pytest.mark.needs("root")
async def test_the_groups_of_the_runner_do_not_count(grant: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(grant, 12345, 12345)
    for name, group in (("theirs", 12345), ("runners", 4242), ("roots", 0), ("nobodys", 65534)):
        (grant / name).write_text(name)
        os.chown(grant / name, 54321, group)
        os.chmod(grant / name, 0o040)
    desk = desk_for(grant)
    before = os.getgroups()
    os.setgroups([0, 4242])  # of all threads
    try:
        for name in ("theirs", "runners", "roots"):
            path = f"{grant}/{name}"
            error = await desk.error(READ, {"path": path})
            assert error == (-32602, f"read {path}: Permission denied (os error 13)", None)
        assert await read(desk, grant / "nobodys") == b"nobodys"
        assert await trio.to_thread.run_sync(os.getgroups) == [0, 4242]  # nothing stays changed
        with monkeypatch.context() as patch:
            patch.setattr(files, "_SYS_SETGROUPS", {})
            assert (await desk.error(READ, {"path": f"{grant}/nobodys"}))[0] == -32602
            # The control: with these groups they are read.
            patch.setattr(files, "_set_groups_of_thread", lambda groups: None)
            for name in ("runners", "roots"):
                assert await read(desk, grant / name) == name.encode()
    finally:
        os.setgroups(before)


@pytest.mark.trio
@pytest.mark.needs("root")
async def test_no_thread_keeps_the_rights_of_another(grant: Path) -> None:
    os.chown(grant, 12345, 12345)
    desk = desk_for(grant)
    for path in ("file", "missing", "../secret"):
        await desk.ask(READ, {"path": f"{grant}/{path}"})
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/status") as file:  # noqa: ASYNC230 -- the kernel's own
                status = file.read().splitlines()
        except (FileNotFoundError, ProcessLookupError):  # it ends at this moment
            continue
        ids = [line.split()[1:] for line in status if line.startswith(("Uid:", "Gid:"))]
        assert ids == [["0"] * 4] * 2


@pytest.mark.trio
async def test_a_race_with_links_is_never_lost(grant: Path) -> None:
    """While requests run, a thread puts in turns a file and a link to the outside under the same name."""
    target = grant / "name"
    target.write_text("inside")
    (grant / "evil").symlink_to("../secret")
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            os.rename(target, grant / "aside")
            os.rename(grant / "evil", target)
            os.rename(target, grant / "evil")
            os.rename(grant / "aside", target)

    swapper = threading.Thread(target=swap)
    swapper.start()
    desk = desk_for(grant)
    seen: set[Any] = set()
    naive: set[str] = set()
    try:
        for _ in range(20_000):
            answer = await desk.ask(READ, {"path": str(target)})
            if answer.error is None:
                seen.add(decode(answer.result["bytes"]))
            else:
                seen.add(answer.error[0])
            assert b"secret" not in seen
            try:
                naive.add(target.read_text())
            except OSError:
                pass
            if "secret" in naive and {b"inside", -32001} <= seen:
                break
    finally:
        over.set()
        swapper.join()
    assert "secret" in naive and {b"inside", -32001} <= seen


def test_roots_are_closed(grant: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    held = GuardedFiles([str(grant)], [str(grant)])
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    del held
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.trio
async def test_nothing_stays_open(grant: Path) -> None:
    desk = desk_for(grant)
    (grant / "out").symlink_to("/etc")
    await read(desk, grant / "file")
    before = sorted(os.listdir("/proc/self/fd"))
    for path in ("file", "missing", "out", "out/passwd", "sub", "../secret"):
        await desk.ask(READ, {"path": f"{grant}/{path}"})
        await desk.ask(LIST, {"path": f"{grant}/{path}"})
    assert sorted(os.listdir("/proc/self/fd")) == before
