"""scripts/bench measures what it claims to, or fails with a reason."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from scripts.bench import PARTS, Counts
from scripts.benches import at_once, call, peers, plugin, starter, workloads
from scripts.benches.caller import Caller, Unable
from scripts.benches.figures import median, percentile
from scripts.benches.hosting import read_document
from scripts.benches.kill import end, find_marked
from scripts.benches.launch import Command, high_descriptors, measure, without_shell
from scripts.benches.resident import resident
from tests.conftest import ROOT
from tests.manifests import nexo

installed = pytest.mark.skipif(
    not Path(sys.executable).with_name("runner").exists(), reason="needs the installed command: scripts/test"
)


def test_percentiles_are_samples() -> None:
    hundred = [float(number) for number in range(100, 0, -1)]
    assert (median(hundred), percentile(hundred, 90), percentile(hundred, 99)) == (50.0, 90.0, 99.0)
    assert percentile([3.0, 1.0], 99) == 3.0
    assert median([7.0]) == 7.0


@pytest.fixture
def caller(plugin_dir: Path) -> Caller:
    return Caller("ourselves", os.geteuid(), str(plugin_dir), str(plugin_dir))


def free_descriptors() -> tuple[int, int]:
    """Two numbers next to each other that this process has not given to a file."""
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    return next((n, n + 1) for n in range(100, 10_000) if not {n, n + 1} & used)


def test_a_shell_line_becomes_the_command_the_shell_would_start(caller: Caller) -> None:
    one, other = free_descriptors()
    line = (
        f"/usr/bin/cat /proc/self/fd/{one} /proc/self/fd/{other} "
        f"{one}< <(printf %s 'two words') {other}</dev/null\n"
    )
    command = without_shell(line, caller)
    assert command.argv == ["/usr/bin/cat", f"/proc/self/fd/{one}", f"/proc/self/fd/{other}"]
    assert (sorted(command.files), command.files[other]) == ([one, other], "/dev/null")
    assert Path(command.files[one]).read_text() == "two words"
    assert measure(caller, command).wall > 0


def test_what_stays_open_leaves_the_descriptors_of_commands_free() -> None:
    before = os.listdir("/proc/self/fd")
    with high_descriptors():
        kept = os.open(os.devnull, os.O_RDONLY)
    assert kept >= 64
    os.close(kept)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("script", ["exit 3", "echo a complaint >&2"])
def test_a_command_that_fails_or_writes_to_stderr_is_not_measured(caller: Caller, script: str) -> None:
    with pytest.raises(Unable, match=re.escape(script)):
        measure(caller, Command(["/bin/sh", "-c", script], {}))


def test_a_leftover_process_is_found() -> None:
    mark = f"60.{os.getpid():020}"
    assert find_marked(mark) == []
    with subprocess.Popen(["/usr/bin/sleep", mark]) as process:
        while not (found := find_marked(mark)):  # its arguments appear a moment after its start
            assert process.poll() is None
        process.kill()
    assert found == [process.pid]
    assert find_marked(mark) == []


@installed
@pytest.mark.needs("user")
@pytest.mark.parametrize("command", ["/usr/bin/true", "/does/not/exist"])
def test_a_plugin_that_ends_by_itself_is_no_measurement_of_a_kill(caller: Caller, command: str) -> None:
    manifest = caller.write("short/nexo-plugin.toml", nexo("short", command))
    with pytest.raises(Unable):
        end(caller, manifest)


def test_a_cold_call_without_an_answer_is_not_measured(caller: Caller) -> None:
    exchange = call.Exchange([b'{"id": 1}\n', b"nobody answers this\n"], b'{"id": 2}\n')
    script = "read a; echo well; read b; read c; echo {}; cat"
    taken = call.cold(caller, Command(["/bin/sh", "-c", script.format("hello")], {}), exchange)
    assert 0 < taken.answer <= taken.end
    for broken in (script.format("no"), "exec cat >&2", f"{script.format('hello')}; exit 3"):
        with pytest.raises(Unable, match=re.escape(broken)):
            call.cold(caller, Command(["/bin/sh", "-c", broken], {}), exchange)


@installed
@pytest.mark.usefixtures("nothing_left")
def test_a_host_that_fails_says_why(caller: Caller) -> None:
    broken = call.Plugin(caller.write("none/mcp.json", "{}"), ["/usr/bin/false"])
    with (
        pytest.raises(Unable, match=r"(?s)host\.py talk .* ended with 1:.*PluginFailure"),
        call.host(caller, broken, "talk", 2, 2) as process,
    ):
        read_document(process)


def test_memory_includes_all_descendants() -> None:
    mark = f"61.{os.getpid():020}"
    with subprocess.Popen(["/bin/sh", "-c", f"/usr/bin/sleep {mark} & wait"]) as process:
        while not (found := find_marked(mark)):
            assert process.poll() is None
        sizes = call.memory(process.pid)
        os.kill(found[0], signal.SIGKILL)
    # The child of a host counts as its fork server.
    assert sizes["host"] > 0 and sizes["fork server"] > 0
    assert sum(sizes.values()) == sizes["host"] + sizes["fork server"]


@pytest.mark.launches
def test_a_peer_that_does_not_start_is_named_and_the_others_are_measured(caller: Caller) -> None:
    def broken(_caller: Caller, _job: peers.Job) -> Command:
        return Command(["/bin/sh", "-c", "echo this kernel is too old >&2; exit 1"], {})

    def try_it(command: Command) -> object:
        return measure(caller, command)

    nexo = next(peer for peer in peers.PEERS if peer.name == peers.NEXO)
    found = peers.FoundPeers((nexo, nexo._replace(name="other", command=broken)), (), ("third is not here",))
    job = peers.Job(Command(["/usr/bin/bwrap"], {}))
    with ExitStack() as stack:
        commands, notes = peers.usable(caller, job, found, stack, try_it)
    assert list(commands) == [peers.NEXO]
    assert {"third is not here", "other is not measured: this kernel is too old"} <= set(notes)


# A library as sandlock's and nono's: what it starts is not confined.
LIBRARY = """
import subprocess
class Sandbox:
    def __init__(self, **_):
        pass
    def run(self, program):
        done = subprocess.run(program, capture_output=True)
        done.exit_code, done.error = done.returncode, None
        return done
    def run_interactive(self, program):
        return subprocess.call(program)
"""


def starter_of(caller: Caller, mode: str, *program: str) -> list[str]:
    folder = str(Path(caller.write("libraries/sandlock.py", LIBRARY)).parent)
    return [sys.executable, "-I", starter.__file__, folder, "sandlock", "/tmp", mode, *program]


def test_a_running_program_launches_as_often_as_it_is_asked(caller: Caller, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    with resident(caller, starter_of(caller, "each", "/bin/sh", "-c", f"echo >> {marks}")) as running:
        assert all(measure(caller, running.command).wall > 0 for _ in range(3))
        assert running.launch(4).wall > 0
    assert len(marks.read_text()) == 7


def test_what_a_program_grows_by_is_measured_while_what_it_started_waits(caller: Caller) -> None:
    with resident(caller, starter_of(caller, "each", *at_once.SLEEP)) as running:
        assert -1000 < at_once.growth(running) < 5000  # kB; a thread each


def test_the_memory_around_programs_that_wait(caller: Caller) -> None:
    around = "import subprocess; held = bytearray(b'x' * (8 << 20)); subprocess.run(['/usr/bin/cat'])"
    size = at_once.waiting(caller, [Command([sys.executable, "-I", "-c", around], {})] * 2)
    assert size > 8 << 10
    assert at_once.waiting(caller, [Command(["/usr/bin/cat"], {})] * 2) == 0
    with pytest.raises(Unable, match="ended with 3"):
        at_once.waiting(caller, [Command(["/bin/sh", "-c", "exit 3"], {})] * 2)


def test_launches_that_begin_together_are_awaited_and_each_has_to_succeed(caller: Caller) -> None:
    assert at_once.together(caller, [Command(["/usr/bin/sleep", "0.1"], {})] * 3) >= 100
    for script in ("exit 3", "echo a complaint >&2"):
        commands = [Command(["/bin/sh", "-c", words], {}) for words in ("exit 0", script)]
        with pytest.raises(Unable, match=re.escape(script)):
            at_once.together(caller, commands)


@pytest.mark.parametrize("script", ["exit 3", "echo a complaint >&2"])
def test_a_launch_by_a_running_program_that_fails_is_not_measured(caller: Caller, script: str) -> None:
    argv = starter_of(caller, "each", "/bin/sh", "-c", script)
    with resident(caller, argv) as running, pytest.raises(Unable, match=re.escape(script)):
        running.launch()


def test_a_library_that_is_not_there_is_no_measurement(caller: Caller) -> None:
    argv = [sys.executable, "-I", starter.__file__, str(ROOT), "nono", "/tmp", "each", "/usr/bin/true"]
    with resident(caller, argv) as running, pytest.raises(Unable, match="No module named 'nono_py'"):
        running.launch()


def test_a_program_is_started_once_with_its_own_streams(caller: Caller) -> None:
    assert caller.output_of(starter_of(caller, "once", "/bin/echo", "well")) == "well\n"
    with pytest.raises(Unable, match="ended with 3"):
        caller.output_of(starter_of(caller, "once", "/bin/sh", "-c", "exit 3"))


@pytest.mark.needs("gcc")
@pytest.mark.skipif(not Path("/usr/bin/git").exists(), reason="needs git")
def test_work_measures_itself_and_work_that_fails_is_not_measured(caller: Caller) -> None:
    folder = workloads.make_folder(caller)
    command = Command([workloads.make_program(caller), str(folder), "2"], {})
    for _ in range(2):  # what the first made is in nobody's way
        taken = workloads.work(caller, command, folder)
        assert set(taken) == set(workloads.KINDS) and all(seconds > 0 for seconds in taken.values())
    commands = {workloads.BARE: command, "peer": Command(["/bin/sh", "-c", "echo too old >&2; exit 1"], {})}
    samples, faults = workloads.interleave(caller, commands, 2, folder)
    assert faults == ["peer is not measured: too old"] and [*samples] == [workloads.BARE]
    (folder / "files/7").unlink()
    with pytest.raises(Unable, match="files/7: No such file"):
        workloads.interleave(caller, commands, 2, folder)


# --- whole runs ---------------------------------------------------------------------------------------------


def run_bench(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.bench", *words],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=900,
    )


def test_without_bubblewrap_it_says_what_to_install() -> None:
    done = run_bench("--quick", "launch", RUNNER_BWRAP="/does/not/exist")
    assert done.returncode == 1
    assert "apt-get install bubblewrap" in done.stderr


@installed
@pytest.mark.broad
@pytest.mark.launches
@pytest.mark.needs("user")
@pytest.mark.usefixtures("nothing_left")
def test_a_quick_run_of_one_part_prints_its_tables_and_writes_no_page() -> None:
    pages = [*(ROOT / "docs/performance").iterdir(), ROOT / "docs/performance.md"]
    before = [page.read_bytes() for page in pages]
    done = run_bench("--quick", "launch", "--launches", "2")
    assert done.returncode == 0, done.stderr
    assert "runner exec, default policy" in done.stdout
    assert "over raw bwrap + python -I -S" in done.stdout
    assert "The load average was" in done.stdout
    assert [page.read_bytes() for page in pages] == before


@pytest.mark.broad
@installed
@pytest.mark.bound(900)
@pytest.mark.needs("user")
@pytest.mark.usefixtures("nothing_left")
def test_every_part_is_measured() -> None:
    """Run everything with the smallest counts. The figures mean nothing, but all are there."""
    fewest = [word for name in Counts._fields for word in (f"--{name}", "10" if name == "most" else "2")]
    done = run_bench("--json", "--no-write", *fewest)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["format"] == 2
    assert {"architecture", "kernel", "Python", "bubblewrap"} <= set(document["machine"])
    assert {"before", "after", "stolen", "sentence"} <= set(document["load"])
    who = ["root", "ordinary user"] if os.geteuid() == 0 else ["ordinary user"]
    if "only root is measured" in done.stderr:  # others cannot read the checkout
        who.remove("ordinary user")
    tables = {(table["part"], table["as"]): table["title"] for table in document["tables"]}
    assert set(tables) == {(part, name) for part in PARTS for name in who}
    for table in document["tables"]:
        names = {row["name"] for row in table["rows"]}
        assert table["title"] in ROWS or names or table["notes"], table["title"]
        assert ROWS.get(table["title"], set()) <= names, table["title"]
        for row in table["rows"]:
            assert row["samples"] and row["unit"], row
            for against in row["against"]:
                assert set(against["rows"]) <= names, row


# What each table has at the least.
ROWS = {
    "launch": {"raw bwrap", "python -I -S", "runner exec, no limits", "runner exec, full limits"},
    "parked cells": {"raw bwrap", "a launch by the library", "a parked cell that is released"},
    "launch as binds grow": {
        f"{who}, {many}"
        for who in ("raw bwrap", "runner exec")
        for many in ("1 bind", "10 binds", "100 binds")
    },
    "peers": {"raw bwrap", "runner exec, default policy", "runner run --write", "raw bwrap, nexo's flags"},
    **{
        f"work: {kind}": {"bare", "runner run --write", "raw bwrap, nexo's flags"}
        for kind in ("gcc", "stat", "open and read", "fork and exec", "git clone")
    },
    **{
        title: {"raw bwrap", "runner exec, default policy", "runner run --write", "raw bwrap, nexo's flags"}
        for title in ("launches at once", "memory of a cage that waits")
    },
    "end": {"an idle plugin", "a fork bomb of 400 tasks"},
    "warm calls": {"a raw pipe", "a raw pipe, by trio", "a session"},
    "large answers": {"a raw pipe", "that, and json.loads", "a session"},
    "cold calls, to the answer": {"raw spawn", "raw bwrap", "runner call"},
    "calls per second by framing": {
        f"{name}, {way}"
        for name in ("lines (mcp)", "lines (nexo)", "lines (kaged)", "Content-Length (ainb)")
        for way in ("raw bwrap", "session")
    },
    **{
        f"answers of {size}, and --inspect": {"raw bwrap", "session", "runner exec", "runner exec --inspect"}
        for size in ("5 bytes", "1 KiB", "64 KiB", "4 MiB")
    },
    "many sessions": {"calls by raw pipes", "calls by sessions", "opened", "closed"},
    "a call as sessions grow": {"1 open", "10 open"},
    "calls through a daemon": {"the library", "the door", "what the door adds"},
    "calls through a daemon, 32 at once": {"the library", "the door"},
    "memory of idle plugins of a daemon": {"the daemon without plugins", "each of 10, all but the plugin"},
    "launch with a network": {"no network", "one host", "raw bwrap"},
    "connections": {"direct", "through the gate"},
    "throughput": {"direct", "through the gate"},
    "processor time of waiting": {"session: call pending", "exec: inspected", "call, no answer"},
}


@pytest.mark.launches
def test_a_plugin_of_ones_own_is_measured(plugin_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ROOT / "runner/contracts/mcp/example", plugin_dir, dirs_exist_ok=True)
    words = [str(plugin_dir), "greet", "--input", '{"name": "you"}', "--calls", "6", "--sessions", "2"]
    assert plugin.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["calls"], found["outcomes"]) == (6, {"ok": 6})
    latency = found["latency_ms"]
    assert list(latency) == ["min", "p50", "p90", "p99", "max"]
    assert list(latency.values()) == sorted(latency.values()) and latency["min"] > 0
    assert plugin.main(["/nonexistent", *words[1:]]) == 1
    assert "there is no such file" in capsys.readouterr().err
