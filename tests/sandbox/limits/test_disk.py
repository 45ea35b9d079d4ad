"""The disk limit, against real writers: each is a process that fills a folder in its own way, below a
process that stands for the cell's init. What watches it is a loop as the runner has one.

How far a writer gets depends on when the machine lets us look, and on a busy one that is late. So where a
test asks for 5 %, it asks for it in one of several attempts; that the writer is ended, in each.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.limits import disk
from sandbox.limits.disk import DiskMeter
from sandbox.limits.disk_usage import ENTRY
from tests import elsewhere
from tests.conftest import Caller
from tests.sandbox.cages import cage, order, request
from tests.tables import one_case, wait_for

MIB = 1 << 20
LIMIT = 64 * MIB
ATTEMPTS = 30

# --- Writers. None writes more than a gigabyte, should nobody end it ---------------------------------------

BLOCKS = (
    "fd = os.open('f', os.O_CREAT | os.O_WRONLY)\nfor _ in range((1 << 30) // {0}): os.write(fd, b'x' * {0})"
)
IN_BLOCKS_OF_64K = BLOCKS.format(64 << 10)
IN_BLOCKS_OF_1M = BLOCKS.format(1 << 20)
SLOWLY = IN_BLOCKS_OF_64K.replace("os.write(", "time.sleep(0.0005); os.write(")
MANY_FILES = """
for i in range(1 << 16):
    with open(f'{i:x}', 'wb', 0) as file: file.write(b'x' * 16384)
"""
EMPTY_FILES = "for i in range(1 << 18): os.close(os.open(f'{i:x}', os.O_CREAT | os.O_WRONLY))"
DIRECTORIES = "for i in range(1 << 18): os.mkdir(f'{i:x}')"
DEEPER = "for _ in range(1 << 14): os.mkdir('d'); os.chdir('d')"
DELETED = IN_BLOCKS_OF_64K.replace("\n", "\nos.unlink('f')\n")
NEVER_NAMED = IN_BLOCKS_OF_64K.replace("'f', os.O_CREAT", "'.', os.O_TMPFILE")
MANY_DELETED = """
held = []
for i in range(1000):
    held.append(os.open('f', os.O_CREAT | os.O_WRONLY)); os.unlink('f'); os.write(held[-1], b'x' * 524288)
"""
MAPPED = """
libc.mmap.restype = ctypes.c_void_p
for i in range(1000):
    fd = os.open('f', os.O_CREAT | os.O_RDWR); os.unlink('f'); os.ftruncate(fd, 1 << 20)
    at = libc.mmap(None, ctypes.c_size_t(1 << 20), 3, 1, fd, ctypes.c_long(0)); os.close(fd)
    ctypes.memset(at, 120, 1 << 20)
"""
IN_FLIGHT = """
here, there = socket.socketpair()
for i in range(100):
    fd = os.open('f', os.O_CREAT | os.O_WRONLY); os.unlink('f'); os.write(fd, b'x' * (1 << 20))
    socket.send_fds(here, [b'x'], [fd]); os.close(fd)
"""
BY_A_BYTE = (
    "fd = os.open('f', os.O_CREAT | os.O_WRONLY)\nfor i in range(1 << 18): os.pwrite(fd, b'x', i << 12)"
)
AFTER_A_REST = "time.sleep(1)\n" + IN_BLOCKS_OF_64K
TWO_PROCESSES = "if not os.fork(): os.mkdir('other'); os.chdir('other')\n" + MANY_FILES
HIDDEN = "os.mkdir('d'); os.chmod('d', 0)"


def filled(place: str, limit: int, program: str, within: str = "") -> dict[str, Any]:
    """Let a writer fill `place` until the meter reports the limit, and end it. `within` makes this process
    mount a filesystem there first: then no other program takes or frees space on it."""
    import ctypes
    import os
    import select
    import signal
    import subprocess
    import sys
    import time

    from sandbox.limits.disk import DiskMeter
    from sandbox.limits.disk_usage import size

    libc = ctypes.CDLL(None, use_errno=True)
    if within:
        assert libc.unshare(0x20000) == 0
        assert libc.mount(None, b"/", None, 0x4000 | 0x40000, None) == 0
        for mount in within.split(";"):
            point, options = mount.split(" ")
            os.makedirs(point, exist_ok=True)
            assert libc.mount(b"t", os.fsencode(point), b"tmpfs", 0, options.encode()) == 0

    def below(pid: int) -> list[int]:
        found, todo = [], [pid]
        while todo:
            at = todo.pop()
            try:
                with open(f"/proc/{at}/task/{at}/children", "rb") as file:
                    children = [int(word) for word in file.read().split()]
            except OSError:
                continue
            found += children
            todo += children
        return found

    libc.prctl(36, 1, 0, 0, 0)  # orphans come to us
    head = "import ctypes, os, socket, time\nlibc = ctypes.CDLL(None)\nos.read(0, 1)\n"
    rest = "\ntime.sleep(600)"
    keep = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', sys.argv[1]], cwd=sys.argv[2])"
    init = subprocess.Popen([sys.executable, "-c", keep, head + program + rest, place], stdin=subprocess.PIPE)
    assert init.stdin is not None
    descriptor = os.open(place, os.O_PATH)
    meter = DiskMeter({place: descriptor}, limit, lambda: below(init.pid))
    os.close(descriptor)
    try:
        assert not meter.measure()
        assert wait_for(lambda: below(init.pid), step=0.001)
        init.stdin.write(b"go")
        init.stdin.flush()
        poll = select.poll()
        until = time.monotonic() + 100
        said = None
        while said is None and time.monotonic() < until:
            poll.poll(-(-max(0.0, meter.due - time.monotonic()) * 1000 // 1))
            said = meter.look({}, time.monotonic())
        # Ended as the runner does it: the program first, and nobody is left stopped.
        for pid in below(init.pid):
            os.kill(pid, signal.SIGKILL)
        ended = init.wait(60)
        held = meter.peaks()["disk"]  # what has no name is gone with its holder
        steps = size(os.open(place, os.O_PATH), 1 << 40)
        try:
            while True:
                next(steps)
        except StopIteration as end:
            held = max(held, end.value.used)
        return {"said": said, "held": held, "where": meter.where, "why": meter.why, "ended": ended}
    finally:
        meter.close()
        for pid in below(os.getpid()):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def place(plugin_dir: Path) -> Path:
    folder = plugin_dir / "folder"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def attempts(
    caller: Caller, place: Path, program: str, ratio: float, limit: int = LIMIT, within: str = ""
) -> None:
    """The writer is always ended, and at least once before it holds more than `ratio` times its limit."""
    held = []
    for number in range(ATTEMPTS):
        folder = place if within else place / str(number)
        if not within:
            folder.mkdir()
            folder.chmod(0o777)
        found = elsewhere.run(caller, filled, str(folder), limit, program, within, timeout=200)
        assert (found["said"], found["where"], found["why"]) == ("disk", str(folder), "")
        assert found["held"] > limit
        subprocess.run(["rm", "-rf", folder], check=not within, stderr=subprocess.DEVNULL)
        held.append(found["held"])
        if found["held"] <= ratio * limit:
            return
    pytest.fail(f"held {[f'{each / limit:.3f}' for each in held]} times its limit")


@one_case(
    "program",
    [
        pytest.param(IN_BLOCKS_OF_64K, id="64 KiB blocks"),
        pytest.param(IN_BLOCKS_OF_1M, id="1 MiB blocks"),
        pytest.param(DELETED, id="deleted file"),
        pytest.param(NEVER_NAMED, id="file never named"),
        pytest.param(BY_A_BYTE, id="a byte in each block"),
        pytest.param(AFTER_A_REST, id="after a rest"),
    ],
)
def test_a_writer_is_ended_within_five_percent(runner_as: Caller, place: Path, program: str) -> None:
    attempts(runner_as, place, program, 1.05)


@pytest.mark.needs("root")
@one_case(
    "program",
    [
        pytest.param(MANY_FILES, id="many files"),
        pytest.param(EMPTY_FILES, id="empty files"),
        pytest.param(TWO_PROCESSES, id="two processes"),
    ],
)
def test_the_plugin_is_frozen_during_a_long_measurement(
    runner_as_root: Caller, place: Path, program: str
) -> None:
    """On a filesystem of its own. Beside other heavy writers, most measurements would be for their
    losses."""
    attempts(runner_as_root, place, program, 1.05, within=f"{place} size=2g,nr_inodes=1m")


@one_case(
    "program",
    [
        pytest.param(MANY_FILES, id="many files"),
        pytest.param(TWO_PROCESSES, id="two processes"),
        pytest.param(EMPTY_FILES, id="empty files"),
        pytest.param(DIRECTORIES, id="directories"),
        pytest.param(MANY_DELETED, id="many deleted files"),
        pytest.param(MAPPED, id="mapped deleted files"),
    ],
)
def test_there_is_no_other_way_to_hold_more(runner_as: Caller, place: Path, program: str) -> None:
    attempts(runner_as, place, program, 3, limit=16 * MIB)


def test_a_small_limit_is_enforced_as_well(runner_as: Caller, place: Path) -> None:
    """In a millisecond more than the limit can be written. The writer is ended all the same."""
    attempts(runner_as, place, IN_BLOCKS_OF_64K, 100, limit=MIB)


@pytest.mark.needs("root")
def test_files_hidden_in_sockets_are_charged_by_the_missing_space(
    runner_as_root: Caller, place: Path
) -> None:
    """On a filesystem of its own: no other program frees the space that the writer takes."""
    found = elsewhere.run(
        runner_as_root, filled, str(place), 16 * MIB, IN_FLIGHT, f"{place} size=2g", timeout=200
    )
    assert (found["said"], found["where"]) == ("disk", str(place))


@pytest.mark.needs("root")
def test_a_filesystem_without_a_free_space_counter(runner_as_root: Caller, place: Path) -> None:
    """tmpfs without a size has no number to watch: only measuring finds the writes."""
    found = elsewhere.run(
        runner_as_root, filled, str(place), 16 * MIB, SLOWLY, f"{place} size=0,nr_inodes=0", timeout=200
    )
    assert found["said"] == "disk"


@pytest.mark.needs("root")
def test_a_filesystem_mounted_below(runner_as_root: Caller, place: Path) -> None:
    """The watched filesystem of the folder does not change, and the writer writes to another."""
    program = "os.chdir('below')\n" + SLOWLY
    within = f"{place} size=2g;{place}/below size=2g"
    found = elsewhere.run(runner_as_root, filled, str(place), 16 * MIB, program, within, timeout=200)
    assert (found["said"], found["where"]) == ("disk", str(place))


@pytest.mark.needs("user")
@pytest.mark.parametrize(
    ("program", "why"), [(DEEPER, "it is nested more than"), (HIDDEN, "'d' cannot be listed")]
)
def test_a_folder_that_cannot_be_measured_is_full(
    runner_as_user: Caller, place: Path, program: str, why: str
) -> None:
    """The writer nests without end, or hides. A few writes start the measurement."""
    noise = "open('n', 'w').write('x' * 8192); time.sleep(0.01); os.unlink('n')"
    noisy = f"if not os.fork():\n    for _ in range(20000): {noise}\n"
    found = elsewhere.run(runner_as_user, filled, str(place), LIMIT, noisy + program, timeout=200)
    assert found["said"] == "disk" and found["why"].startswith(why)
    assert found["held"] < LIMIT
    subprocess.run(["rm", "-rf", place], check=True)
    place.mkdir()


# --- In the cage ------------------------------------------------------------------------------------------


def filled_in_a_cage(given: dict[str, Any], place: str, limit: int) -> dict[str, Any]:
    """Like `filled`, with the cell's own processes and its own end."""
    import os
    import select
    import time
    from contextlib import contextmanager

    from sandbox.limits.disk import DiskMeter

    descriptor = os.open(place, os.O_PATH)
    with contextmanager(cage)(given) as cell:
        meter = DiskMeter({place: descriptor}, limit, cell.processes)
        poll = select.poll()
        poll.register(cell.pidfd, select.POLLIN)
        until = time.monotonic() + 100
        said = None
        ready: list[tuple[int, int]] = []
        while said is None and not ready and time.monotonic() < until:
            ready = poll.poll(-(-max(0.0, meter.due - time.monotonic()) * 1000 // 1))
            said = meter.look({}, time.monotonic())
        cell.end()
        code = cell.wait().code
        meter.close()
    return {
        "said": said,
        "where": meter.where,
        "why": meter.why,
        "unseen": meter._unseen_since is not None or meter.blind,
        "code": code,
    }


@one_case(
    "program",
    [
        pytest.param(IN_BLOCKS_OF_64K, id="file"),
        pytest.param(MANY_DELETED, id="deleted files"),
        pytest.param(MAPPED, id="mapped deleted files"),
    ],
)
@pytest.mark.usefixtures("nothing_left")
def test_a_plugin_in_its_cage(runner_as: Caller, plugin_dir: Path, place: Path, program: str) -> None:
    """Two user namespaces away, as another uid if we are root: its descriptors are still visible."""
    head = f"import ctypes, os, time\nlibc = ctypes.CDLL(None)\nos.chdir({str(place)!r})\n"
    asked = request("/usr/bin/python3", "-c", head + program, directory=str(plugin_dir), root=None)
    given = order(asked, paths=[(str(place), "write")])
    found = elsewhere.run(
        runner_as, filled_in_a_cage, given, str(place), 16 * MIB, using=(cage,), timeout=200
    )
    unseen = found.pop("unseen")
    assert found == {"said": "disk", "where": str(place), "why": "", "code": 128 + signal.SIGKILL}
    assert not unseen or program == MAPPED  # of which only root may ask for the size


# --- Who is not ended -------------------------------------------------------------------------------------


@contextlib.contextmanager
def meter(
    folders: list[Path],
    limit: int = 16 * MIB,
    processes: Callable[[], list[int]] | None = list,
    freeze: Callable[[bool], None] | None = None,
) -> Iterator[DiskMeter]:
    descriptors = {str(path): os.open(path, os.O_PATH) for path in folders}
    before = len(os.listdir("/proc/self/fd"))
    made = DiskMeter(descriptors, limit, processes, freeze)
    try:
        yield made
    finally:
        made.close()
        assert len(os.listdir("/proc/self/fd")) == before
        for fd in descriptors.values():
            os.close(fd)


def watched(made: DiskMeter, until: Callable[[], bool]) -> str | None:
    """Look whenever it is due, until a condition holds."""
    end = time.monotonic() + 100
    while not until() and time.monotonic() < end:
        time.sleep(max(0.0, min(made.due - time.monotonic(), 1.0)))
        if said := made.look({}, time.monotonic()):
            return said
    assert until()
    return None


@contextlib.contextmanager
def running(program: str, place: Path, **popen: Any) -> Iterator[subprocess.Popen[bytes]]:
    head = "import os, time\n"
    with subprocess.Popen(["/usr/bin/python3", "-c", head + program], cwd=place, **popen) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_plugin_is_charged_from_what_was_there_before_it(place: Path) -> None:
    """The folder is measured before the plugin starts, and not again as soon as it runs: what it writes
    meanwhile counts."""
    with meter([place], processes=None) as made:
        assert not made.measure()
        measured, begun = made._ended, "time.sleep(600)"
        hold = "f = open('f', 'wb'); f.write(bytes(1 << 25)); f.flush(); os.unlink('f'); os.write(1, b'.')\n"
        with running(hold + begun, place, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.read(1) == b"."
            made.watch_processes(lambda: [process.pid])
            assert made._ended == measured
            assert watched(made, lambda: False) == "disk"
            assert made.where == str(place)
    # The control: without a plugin nobody looks for files that have no name.
    with (
        meter([place], processes=None) as made,
        running(hold + begun, place, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None and process.stdout.read(1) == b"."
        assert not made.measure()


def test_writes_beside_the_folder_do_not_count(plugin_dir: Path, place: Path) -> None:
    """Three times the limit on the same filesystem: measured, and nothing found."""
    with meter([place]) as made:
        assert not made.measure()
        writer = (
            f"fd = os.open('f', os.O_CREAT | os.O_WRONLY)\nfor _ in range(48): os.write(fd, b'x' * {MIB})"
        )
        with running(writer, plugin_dir) as neighbour:
            assert watched(made, lambda: neighbour.poll() is not None) is None
            assert neighbour.returncode == 0
        assert watched(made, lambda: made.look({}, time.monotonic()) is None) is None
        assert made.where is None and made.peaks()["disk"] <= 4 * ENTRY


def test_each_folder_has_the_whole_limit(plugin_dir: Path) -> None:
    folders = [plugin_dir / name for name in ("a", "b", "c")]
    for path in folders:
        path.mkdir()
        (path / "f").write_bytes(b"x" * 10 * MIB)
    with meter(folders) as made:
        assert not made.measure()
        assert [used // MIB for used in made.usage.values()] == [10, 10, 10]
        (folders[1] / "g").write_bytes(b"x" * 7 * MIB)
        assert made.measure() and made.where == str(folders[1])
        assert made.look({}, time.monotonic()) == "disk"


def test_deleting_makes_room(place: Path) -> None:
    with meter([place]) as made:
        for _ in range(8):
            (place / "f").write_bytes(b"x" * 15 * MIB)
            assert made.look({}, made.due) is None
            (place / "f").unlink()
        assert not made.measure()


def test_a_folder_that_is_full_at_the_start_is_reported_at_the_first_look(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.limits.disk._SLICE_SECONDS", 60)  # a busy machine may take several
    (place / "f").write_bytes(b"x" * 17 * MIB)
    with meter([place]) as made:
        assert made.look({}, time.monotonic()) == "disk"
        assert made.where == str(place) and made.why == ""
        assert made.peaks()["disk"] > 16 * MIB
        assert made.look({}, time.monotonic()) == "disk"  # and from then on
    (place / "f").write_bytes(b"x" * 15 * MIB)
    with meter([place]) as made:
        assert made.look({}, time.monotonic()) is None


def test_a_file_may_be_a_folder_of_its_own(place: Path) -> None:
    (place / "f").write_bytes(b"x" * 15 * MIB)
    (place / "beside").write_bytes(b"x" * 17 * MIB)
    with meter([place / "f"]) as made:
        assert not made.measure()
        assert made.usage == {str(place / "f"): 15 * MIB}
        with open(place / "f", "ab") as file:
            file.write(b"x" * 2 * MIB)
        assert watched(made, lambda: False) == "disk"


def test_without_a_folder_there_is_nothing_to_look_at() -> None:
    with meter([]) as made:
        assert not made.measure()
        assert made.look({}, time.monotonic()) is None and made.due == float("inf")
        assert made.peaks() == {"disk": 0}


@pytest.mark.needs("root")
def test_deleted_files_count_where_they_were(plugin_dir: Path) -> None:
    """Not a deleted file to which the caller has redirected a stream, nor one the plugin never could
    write."""
    folders = [plugin_dir / name for name in ("a", "b")]
    for path in folders:
        path.mkdir()
    hold = f"""
fd = os.open('f', os.O_CREAT | os.O_RDWR); os.unlink('f'); os.write(fd, b'x' * (5 * {MIB}))
os.write(1, b'x' * (9 * {MIB})); os.write(2, b'.'); time.sleep(600)
"""
    with open(plugin_dir / "output", "w+b") as output:
        (plugin_dir / "output").unlink()
        with running(hold, folders[0], stdout=output, stderr=subprocess.PIPE) as process:
            assert process.stderr is not None and process.stderr.read(1) == b"."
            with meter(folders, processes=lambda: [process.pid]) as made:
                assert not made.measure()
                in_a, in_b = (made.usage[str(path)] for path in folders)
                assert 5 * MIB <= in_a <= 5 * MIB + 4 * ENTRY and in_b <= 4 * ENTRY


# --- Held still, and never for good -----------------------------------------------------------------------


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def many(place: Path, number: int) -> None:
    """Enough files that a measurement takes more than one slice."""
    for at in range(number):
        (place / f"{at:x}").touch()


def alarmed(made: DiskMeter, place: Path) -> None:
    """Make the filesystem lose more than the folder has room for, until the plugin is held and measured. A
    measurement that runs beside it comes first, if others have freed space."""
    end = time.monotonic() + 60
    with open(place.parent / "noise", "wb", buffering=0) as noise:
        while time.monotonic() < end:
            if made._measuring is None and made.due <= time.monotonic():
                noise.write(b"x" * 8 * MIB)
            assert made.look({}, time.monotonic()) is None
            if made._measuring is not None and made._frozen:
                return
    pytest.fail("never held")


class Frozen:
    """A group of our own in the v2 tree; it needs no controllers."""

    def __init__(self) -> None:
        for root in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup"):
            self.path = Path(root, f"rt-disk-{os.getpid()}")
            if Path(root, "cgroup.controllers").exists():
                try:
                    self.path.mkdir()
                except OSError as error:
                    pytest.skip(f"needs a cgroup v2 tree to write to: {error}")
                return
        pytest.skip("needs a cgroup v2 tree")

    def __call__(self, on: bool) -> None:
        (self.path / "cgroup.freeze").write_text("1" if on else "0")

    def is_on(self) -> bool:
        return "frozen 1" in (self.path / "cgroup.events").read_text()


@pytest.fixture
def frozen() -> Iterator[Frozen]:
    group = Frozen()
    yield group

    def is_removed() -> bool:
        with contextlib.suppress(OSError):
            group.path.rmdir()
        return not group.path.exists()

    assert wait_for(is_removed), f"{group.path} is left"


@pytest.mark.needs("root")
@pytest.mark.parametrize("ending", ["measured", "closed", "failed"])
def test_a_cgroup_is_frozen_while_it_is_measured_and_never_after(
    place: Path, frozen: Frozen, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    many(place, 3000)
    with running("time.sleep(600)", place) as process:
        (frozen.path / "cgroup.procs").write_text(str(process.pid))
        with meter([place], processes=lambda: [process.pid], freeze=frozen) as made:
            monkeypatch.setattr("sandbox.limits.disk._SLICE_SECONDS", 0)
            assert not made.measure()
            assert not frozen.is_on()  # only for an alarm
            alarmed(made, place)
            assert _becomes(frozen.is_on)
            if ending == "measured":
                assert watched(made, lambda: made._measuring is None) is None
            elif ending == "failed":
                monkeypatch.setattr(made, "_search", _fails)
                with pytest.raises(RuntimeError):
                    watched(made, lambda: False)
            else:
                made.close()
            assert _becomes(lambda: not frozen.is_on())


def _fails(_: object) -> Iterator[None]:
    raise RuntimeError


def _becomes(condition: Callable[[], bool]) -> bool:
    return wait_for(condition, 60, step=0.002)


def test_without_a_cgroup_processes_are_stopped_and_go_on(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many(place, 3000)
    fork = "import sys\nif not os.fork(): print(os.getpid(), flush=True)\ntime.sleep(600)"
    with running(fork, place, stdout=subprocess.PIPE, bufsize=0) as init:
        child = int(elsewhere.line(init))
        try:
            with meter([place], processes=lambda: [init.pid, child]) as made:
                monkeypatch.setattr("sandbox.limits.disk._SLICE_SECONDS", 0)
                assert not made.measure()
                alarmed(made, place)
                assert _becomes(lambda: state(child) == "T")
                assert state(init.pid) == "S"
                assert watched(made, lambda: made._measuring is None) is None
                assert _becomes(lambda: state(child) == "S")
                alarmed(made, place)
            assert _becomes(lambda: state(child) == "S")  # given up half-way
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_plugin_that_ran_during_the_measurement_is_measured_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that were counted and then deleted never existed together with those written later."""
    (place / "before").write_bytes(b"x" * 10 * MIB)
    held: list[bool] = []

    def freeze(on: bool) -> None:
        held.append(on)
        (place / "before").unlink(missing_ok=True)

    with meter([place], freeze=freeze) as made:
        assert not made.measure()
        (place / "after").write_bytes(b"x" * 10 * MIB)
        monkeypatch.setattr("sandbox.limits.disk._QUICK_SECONDS", 0)  # as if it had taken long
        assert not made.measure()
        assert held == [True, False]
        (place / "more").write_bytes(b"x" * 10 * MIB)
        assert made.measure() and made.where == str(place)
        assert held == [True, False] * 2


def test_a_plugin_that_crosses_its_limit_during_a_measurement_is_frozen(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many(place, 3000)
    held: list[bool] = []
    before, taken = list(os.statvfs(place)), 0

    def free_space(_: int) -> os.statvfs_result:
        """As if nobody else wrote to the disk, or removed something."""
        return os.statvfs_result((*before[:3], before[3] - taken // before[1], *before[4:]))

    monkeypatch.setattr(os, "fstatvfs", free_space)
    with meter([place], limit=256 * MIB, freeze=held.append) as made:
        monkeypatch.setattr("sandbox.limits.disk._SLICE_SECONDS", 0)
        assert not made.measure()
        taken = 65536
        made._ended = -1000.0
        assert made.look({}, time.monotonic()) is None
        assert made._measures() and held == []
        taken = 300 * MIB
        assert made.look({}, time.monotonic()) is None
        assert made._measures() and held == [True]
    assert held == [True, False]


class Steps:
    """The module `time`, with a clock that moves whenever it is read: as fast as the meter works."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        self.now += 0.0001
        return self.now


def test_freezes_are_rare(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour that never stops writing must not stop the plugin: most alarms leave it running. By a clock
    of its own, because every measurement has to take about as long as the others."""
    many(place, 2000)
    held: list[bool] = []
    monkeypatch.setattr(disk, "time", clock := Steps())
    with meter([place], limit=16 * MIB, freeze=held.append) as made:
        assert not made.measure()
        with open(place.parent / "noise", "wb", buffering=0) as noise:
            measured, end = 0, time.monotonic() + 60
            while measured < 10 and time.monotonic() < end:
                noise.write(b"x" * MIB)
                before = made._began
                assert made.look({}, clock.monotonic()) is None
                measured += made._began != before
        assert measured == 10
    assert 1 <= held.count(True) < 5
    assert held == [True, False] * held.count(True)


# --- What it costs ----------------------------------------------------------------------------------------


def test_an_idle_plugin_is_rarely_checked(place: Path) -> None:
    """With a gigabyte of room, four times a second; and never measured while nothing changes."""
    with meter([place], limit=4 << 30) as made:
        assert not made.measure()
        now = time.monotonic()
        assert made.look({}, now) is None
        due = made.due
        assert due <= now + 0.251  # earlier, if a busy machine makes the regular measurement due
        assert made.look({}, due - 0.001) is None
        assert made.due == due  # too early: not even looked at


def test_a_slow_measurement_before_the_start_puts_off_no_other(place: Path) -> None:
    """It had to read the disk. The plugin may have prepared that: with many names, before a restart."""
    with meter([place], processes=None) as made:
        assert not made.measure()
        made._cost = 60.0
        assert made._next_measurement() > time.monotonic() + 100  # the control
        made.watch_processes(list)
        assert made._next_measurement() < time.monotonic() + 100


def test_the_closer_to_the_end_the_more_often(place: Path) -> None:
    rooms = [(64 - size) * MIB for size in (0, 32, 56, 62)]
    pauses = [disk._pause(room, writing=False) for room in rooms]
    assert pauses == sorted(pauses, reverse=True)
    assert 0.005 < pauses[0] < 0.02 and pauses[-1] == pytest.approx(0.001)
    assert disk._pause(rooms[0], writing=True) == pytest.approx(pauses[0] / 4)
    with meter([place], limit=64 * MIB) as made:
        assert not made.measure()
        now = time.monotonic()
        assert made.look({}, now) is None
        assert made.due - now <= pauses[0] + 0.001  # a quarter, while others write to this filesystem
