"""scripts/bench measures what it claims to, or fails with a reason."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benches import call
from scripts.benches.caller import Caller, Unable
from scripts.benches.figures import median, percentile, tail
from scripts.benches.kill import end, marked
from scripts.benches.launch import Command, measure, without_shell
from tests.conftest import ROOT

installed = pytest.mark.skipif(
    not Path(sys.executable).with_name("runner").exists(), reason="needs the installed command: scripts/test"
)


FEWEST = ("launches", "kills", "bombs", "calls", "colds", "larges", "sessions", "connections", "downloads")
PARTS = ("launch", "kill", "warm calls", "large answers", "cold calls", "sessions", "network")
# Only root can make the network namespaces of their servers.
ROOTS_PARTS = ("connections", "throughput", "memory of the gate") if os.geteuid() == 0 else ()


def test_percentiles_are_samples() -> None:
    hundred = [float(number) for number in range(100, 0, -1)]
    assert (median(hundred), percentile(hundred, 90), percentile(hundred, 99)) == (50.0, 90.0, 99.0)
    assert percentile([3.0, 1.0], 99) == 3.0
    assert median([7.0]) == 7.0


def test_the_tail_of_few_samples_is_their_maximum() -> None:
    assert tail([1.0] * 99 + [5.0]) == "p99      1.0"
    assert tail([1.0] * 98 + [5.0]) == "max      5.0"


@pytest.fixture
def caller(plugin_dir: Path) -> Caller:
    return Caller("ourselves", os.geteuid(), str(plugin_dir), str(plugin_dir))


def test_a_shell_line_becomes_the_command_the_shell_would_start(caller: Caller) -> None:
    line = "/usr/bin/cat /proc/self/fd/207 /proc/self/fd/208 207< <(printf %s 'two words') 208</dev/null\n"
    command = without_shell(line, caller)
    assert command.argv == ["/usr/bin/cat", "/proc/self/fd/207", "/proc/self/fd/208"]
    assert (sorted(command.files), command.files[208]) == ([207, 208], "/dev/null")
    assert Path(command.files[207]).read_text() == "two words"
    assert measure(caller, command).wall > 0


@pytest.mark.parametrize("script", ["exit 3", "echo a complaint >&2"])
def test_a_command_that_fails_or_writes_to_stderr_is_not_measured(caller: Caller, script: str) -> None:
    with pytest.raises(Unable, match=re.escape(script)):
        measure(caller, Command(["/bin/sh", "-c", script], {}))


def test_a_leftover_process_is_found() -> None:
    mark = f"60.{os.getpid():020}"
    assert marked(mark) == []
    with subprocess.Popen(["/usr/bin/sleep", mark]) as process:
        while not (found := marked(mark)):  # its arguments appear a moment after its start
            assert process.poll() is None
        process.kill()
    assert found == [process.pid]
    assert marked(mark) == []


@installed
@pytest.mark.needs("user")
@pytest.mark.parametrize("command", ["/usr/bin/true", "/does/not/exist"])
def test_a_plugin_that_ends_by_itself_is_no_measurement_of_a_kill(caller: Caller, command: str) -> None:
    manifest = caller.write(
        "short/nexo-plugin.toml",
        '[plugin]\nid = "short"\nversion = "1.0.0"\nname = "Short"\ndescription = "Ends at once."\n'
        f'min_nexo_version = ">=0.1"\n[plugin.entrypoint]\ncommand = "{command}"\n',
    )
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
        call.read_document(process)


def test_memory_includes_all_descendants() -> None:
    mark = f"61.{os.getpid():020}"
    with subprocess.Popen(["/bin/sh", "-c", f"/usr/bin/sleep {mark} & wait"]) as process:
        while not (found := marked(mark)):
            assert process.poll() is None
        sizes = call.memory(process.pid)
        os.kill(found[0], signal.SIGKILL)
    # The child of a host counts as its fork server.
    assert sizes["host"] > 0 and sizes["fork server"] > 0
    assert sum(sizes.values()) == sizes["host"] + sizes["fork server"]


@installed
@pytest.mark.needs("user")
@pytest.mark.usefixtures("nothing_left")
def test_every_figure_is_printed() -> None:
    """Run the whole benchmark with the smallest counts. The figures mean nothing, but all are printed."""
    few = [word for name in FEWEST for word in (f"--{name}", "2")]
    argv = [sys.executable, "-m", "scripts.bench", *few]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    parts = re.split(r"\n\n", done.stdout.strip())
    who = ["root", "ordinary user"] if os.geteuid() == 0 else ["ordinary user"]
    if "only root is measured" in done.stdout:  # others cannot read the checkout
        who.remove("ordinary user")
    assert [re.match(r"([a-z ]+), as ([a-z ]+)", part).groups() for part in parts[1:]] == [  # type: ignore[union-attr]
        (what, name) for name in who for what in (*PARTS, *ROOTS_PARTS)
    ]
    for part in parts[1:]:
        for figures in FIGURES[part.partition(",")[0]]:
            assert re.search(f"^  {figures}$", part, re.MULTILINE), figures


_N = r" +\d+\.\d"
_RATIO = r"ratio \d+\.\d\d"
_SPREAD = rf"{_RATIO} \(p10 \d+\.\d\d, p90 \d+\.\d\d\)"
_KB = r" +\d+ kB, +\d+\.\d kB per session"
_WAYS = ("direct", "through the gate")

# The lines of each part.
FIGURES = {
    "launch": [
        *(
            f"{name}{_N * 4}"
            for name in ("no limits", "default policy", "full limits", "full, and of stderr", "raw bwrap")
        ),
        rf"full limits over no limits: p50 [+-]\d+\.\d .*{_RATIO}",
    ],
    "kill": [
        rf"{name} +p50{_N} +max{_N} +min{_N} +\(2 times\)"
        for name in ("an idle plugin", "a fork bomb of 400 tasks")
    ],
    "warm calls": [
        *(
            rf"{name} +p50{_N} +max{_N} +\d+ per second"
            for name in ("a raw pipe", "a raw pipe, by trio", "a session")
        ),
        f"a session over a raw pipe: {_SPREAD}",
        f"a session over a raw pipe, by trio: {_SPREAD}",
    ],
    "large answers": [
        *(
            rf"{name} +p50{_N} +max{_N} +\d+ MiB per second"
            for name in ("a raw pipe", "that, and json.loads", "a session")
        ),
        f"a session over a raw pipe: {_SPREAD}",
        f"a session over that, and json.loads: {_SPREAD}",
    ],
    "cold calls": [
        *(f"{name}{_N * 5}" for name in ("raw spawn", "raw bwrap", "runner call")),
        *(
            rf"runner call over {name}: answer [+-]\d+\.\d, {_RATIO}; end, {_RATIO}"
            for name in ("raw spawn", "raw bwrap")
        ),
    ],
    "sessions": [
        r"opened in \d+ ms, closed in \d+ ms; as many raw plugins were started and greeted in \d+ ms",
        rf"calls per second, over all of them: \d+; by raw pipes \d+, {_RATIO}",
        r"memory of the runner per session: \d+ kB; each after the first adds -?\d+ kB",
        *(f"  {name}{_KB}" for name in ("host", "fork server", "monitors", "inits")),
        *(f"  {name}{_KB}, not the runner's" for name in ("bwrap", "plugin")),
    ],
    "network": [
        *(f"{name}{_N * 4}" for name in ("no network", "one host", "raw bwrap")),
        *(rf"one host over {name}: p50 [+-]\d+\.\d .*{_RATIO}" for name in ("no network", "raw bwrap")),
    ],
    "connections": [
        *(rf"{name} +p50 +\d+\.\d+ +p90 +\d+\.\d+ +min +\d+\.\d+" for name in _WAYS),
        rf"the gate adds p50 -?\d+\.\d+ for each, {_RATIO}",
    ],
    "throughput": [
        *(rf"{name} +p50 +\d+ +max +\d+" for name in _WAYS),
        f"through the gate over direct: {_SPREAD}",
    ],
    "memory of the gate": [
        *(rf"{name} +\d+" for name in ("after the first connection", "when all were closed")),
        r"with 100 open connections +\d+, -?\d+\.\d for each",
    ],
}
