"""Between a host and a plugin: here the test is both, then the real thing."""

from __future__ import annotations

import fcntl
import json
import math
import os
import random
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.contracts.mcp.inspector import make as make_mcp
from runner.contracts.nexo.inspector import make as make_nexo
from runner.contracts.rune.inspector import make as make_rune
from runner.launch.inspect.inspection import Inspection
from runner.plugin import Plugin
from runner.protocol.dialect import Setting, Violation
from runner.protocol.inspector import Inspector
from runner.protocol.rpc_reader import Withheld
from sandbox.limits.meter import VIOLATION
from sandbox.spec import Limits, SandboxSpec
from sandbox.streams.relay import Relay
from tests import manifests
from tests.conftest import Caller
from tests.tables import one_case

Write = Callable[..., Path]

RUNE = Plugin("tried", "1", "rune", "Tried", "", "/p/rterm-plugin.json", "/p", None, SandboxSpec())
NEXO = Plugin("tried", "1", "nexo", "Tried", "", "/p/nexo-plugin.toml", "/p", None, SandboxSpec())
HANDSHAKE = (
    b'{"type":"handshake","manifest":{"plugin_id":"tried","plugin_version":"1",'
    b'"protocol_version":"rterm.plugin.v1","exposed_tools":["t"]}}\n'
)
ASK = b'{"type":"handshake","protocol_version":"rterm.plugin.v1"}\n'
MESSAGE = b'{"jsonrpc":"2.0","method":"m"}\n'
PIPE = 64 << 10


class Between:
    """An Inspection whose both sides are ours. Every end of ours does not block."""

    def __init__(self, inspector: Inspector, limits: Limits = Limits(), **more: Any) -> None:  # noqa: B008
        stdin, self.host_in = os.pipe()
        self.host_out, stdout = os.pipe()
        self.inspection = Inspection(inspector, limits, stdin=stdin, stdout=stdout, **more)
        # As after a launch: the plugin has its own copies, and those it was lent are given back.
        self.plugin_in = os.dup(self.inspection.to_plugin.end)
        self.plugin_out = os.dup(self.inspection.to_host.end)
        self.inspection.to_plugin.release()
        self.inspection.to_host.release()
        os.close(stdout)  # the sink has its own
        self._stdin = stdin
        for fd in (self.host_in, self.host_out, self.plugin_in, self.plugin_out):
            os.set_blocking(fd, False)

    def turn(self, now: float | None = None) -> str | None:
        """Look until there is nothing to do; what the last look said."""
        while True:
            poll = select.poll()
            for fd, events in self.inspection.interest().items():
                poll.register(fd, events)
            ready = dict(poll.poll(0))
            before = self._progress()
            said = self.inspection.look(ready, time.monotonic() if now is None else now)
            if before == self._progress():
                return said

    def _progress(self) -> tuple[Any, ...]:
        up, down = self.inspection.to_plugin, self.inspection.to_host
        return up._taken, up.passed, up._sink.fd, down.bytes, down.passed, down._read

    def finish(self) -> None:
        self.inspection.finish(0.1)

    def close(self) -> None:
        self.inspection.close()
        for fd in (self.host_in, self.host_out, self.plugin_in, self.plugin_out, self._stdin):
            if fd >= 0:
                os.close(fd)

    def shut(self, name: str) -> None:
        os.close(getattr(self, name))
        setattr(self, name, -1)


@contextmanager
def between(inspector: Inspector, limits: Limits = Limits(), **more: Any) -> Iterator[Between]:  # noqa: B008
    both = Between(inspector, limits, **more)
    try:
        yield both
    finally:
        both.close()


def rune() -> Inspector:
    return make_rune(Setting(RUNE, declare=("*",)))


def nexo() -> Inspector:
    return make_nexo(Setting(NEXO))


def mcp() -> Inspector:
    return make_mcp(Setting(NEXO._replace(contract="mcp")))


def got(fd: int, size: int = 1 << 20) -> bytes:
    """All that is there."""
    found = b""
    while True:
        try:
            data = os.read(fd, size)
        except BlockingIOError:
            return found
        if not data:
            return found
        found += data


def ended(fd: int) -> bool:
    try:
        return os.read(fd, 1) == b""
    except BlockingIOError:
        return False


def pushed(fd: int, data: bytes, turn: Callable[[], object]) -> int:
    """Write for as long as somebody takes it."""
    count = 0
    while True:
        try:
            count += os.write(fd, data)
        except BlockingIOError:
            turn()
            try:
                count += os.write(fd, data)
            except BlockingIOError:
                return count


PASSED = (
    b"",
    b"\r",
    MESSAGE[:-1] + b"\r",
    b'{"id":1,"error":{"code":1}}',
    b'  {"method": "m", "params": "\xff"}',
)
LINES = st.lists(
    st.one_of(
        st.binary(max_size=40).map(lambda noise: b"x" + noise.replace(b"\n", b"")),
        st.sampled_from((*PASSED, b"[1]", b'{"a":1}')),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(lines=LINES, last=st.sampled_from([b"", MESSAGE[:-1]]), data=st.data())
def test_any_split_arrives_as_it_was_sent(lines: list[bytes], last: bytes, data: st.DataObject) -> None:
    stream = b"".join(line + b"\n" for line in lines) + last
    passed = [line for line in lines if line in PASSED]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    with between(nexo()) as both:
        for piece in pieces:
            os.write(both.plugin_out, piece)
            os.write(both.host_in, piece)
            assert both.turn() is None
        both.shut("host_in")
        both.turn()
        assert got(both.plugin_in) == stream and ended(both.plugin_in)
        whole = b"".join(line + b"\n" for line in passed)
        assert got(both.host_out) == whole  # a line comes when it is whole
        both.shut("plugin_out")
        both.turn()
        assert got(both.host_out) == last
        assert both.inspection.breach is None
        document = both.inspection.document()
        count, lost = len(passed) + bool(last), len(stream) - len(whole + last)
        assert document["to_host"] == {"frames": count, "bytes": len(whole + last), "withheld": lost}
        assert sum(document["strays"].values()) - passed.count(PASSED[3]) == len(lines) - len(passed)
        assert document["to_plugin"]["bytes"] == len(stream)


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["jsonrpc", "id", "method", "params", "result", "error", "topic", "event", "type"]
            )
            | st.sampled_from(["manifest", "plugin", "tools", "request_id", "status", "supportedVersions"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)
SAID = st.one_of(
    st.binary(max_size=60),
    VALUES.map(lambda value: json.dumps(value).encode()),
    VALUES.map(lambda value: json.dumps({"id": 1, "result": value}).encode()),
    VALUES.map(lambda value: json.dumps({"method": "broker.publish", "params": value}).encode()),
    VALUES.map(lambda value: json.dumps({"type": "handshake", "manifest": value}).encode()),
    st.sampled_from(
        [
            b'{"id":1,"method":"initialize"}',
            b'{"id":1,"method":"server/discover"}',
            ASK.strip(),
            HANDSHAKE.strip(),
        ]
    ),
)


@settings(max_examples=300, deadline=None)
@given(make=st.sampled_from([rune, nexo, mcp]), said=st.lists(st.tuples(st.booleans(), SAID), max_size=8))
def test_whatever_is_said_has_a_meaning(
    make: Callable[[], Inspector], said: list[tuple[bool, bytes]]
) -> None:
    inspector = make()
    for by_host, raw in said:
        if by_host:
            inspector.host_frame(raw)
        else:
            found = inspector.plugin_frame(raw)
            if isinstance(found, Violation):
                assert found.message and found.cause
                break
            if isinstance(found, Withheld):
                assert found.why and inspector.strays[found.kind]
        assert all(count > 0 for count in inspector.strays.values())


@pytest.mark.parametrize("cut", [1, len(HANDSHAKE) - 1, len(HANDSHAKE), len(HANDSHAKE) + 3])
def test_the_host_gets_what_came_before_and_not_the_breach(cut: int) -> None:
    with between(rune()) as both:
        stream = HANDSHAKE + b"oops\n" + b"more\n"
        os.write(both.host_in, ASK)
        os.write(both.plugin_out, stream[:cut])
        assert both.turn() is None
        os.write(both.plugin_out, stream[cut:])
        assert both.turn() == VIOLATION
        os.write(both.plugin_out, HANDSHAKE)  # it is not dead yet
        assert both.turn() == VIOLATION
        both.finish()
        assert got(both.host_out) == HANDSHAKE
        assert both.inspection.breach is not None and both.inspection.breach.phase == "run"
        violation = both.inspection.document()["violation"]
        assert (violation["code"], violation["cause"]) == ("malformed_response", "bad_json")


def test_a_line_without_an_end_is_not_held() -> None:
    with between(rune()) as both:
        sent = 0
        while both.turn() is None:
            sent += os.write(both.plugin_out, b"x" * PIPE)
            assert sent <= (1 << 20) + 2 * PIPE
            assert both.inspection.to_host._framer.pending <= (1 << 20) + 1
        breach = both.inspection.breach
        assert breach is not None and breach.violation.cause == "frame_too_large"
        assert breach.violation.message == f"a line is longer than {1 << 20} bytes"
        assert breach.phase == "handshake"
        assert got(both.host_out) == b""


def test_a_host_that_does_not_read_holds_the_plugin_and_nothing_else() -> None:
    line = b'{"jsonrpc":"2.0","method":"' + b"m" * 1000 + b'"}\n'
    with between(nexo()) as both:
        taken = pushed(both.plugin_out, line, both.turn)
        # The host's pipe, what is held, one more read, and the plugin's own pipe.
        assert 2 * PIPE < taken <= 4 * PIPE + len(line)
        os.write(both.host_in, b"are you there?\n")
        both.turn()
        assert got(both.plugin_in) == b"are you there?\n"
        arrived = b""
        while len(arrived) < taken:
            more = got(both.host_out)
            both.turn()
            assert more or len(arrived) < taken
            arrived += more
        stream = line * (taken // len(line) + 1)
        assert arrived == stream[: len(arrived)]


def test_a_plugin_that_does_not_read_holds_its_host_and_nothing_else() -> None:
    with between(nexo()) as both:
        taken = pushed(both.host_in, b"x" * 999 + b"\n", both.turn)
        assert taken <= 3 * PIPE + 1000
        os.write(both.plugin_out, b'{"jsonrpc":"2.0","method":"m"}\n')
        assert both.turn() is None
        assert got(both.host_out) == b'{"jsonrpc":"2.0","method":"m"}\n'


def test_what_the_host_says_goes_on_at_once_and_at_any_length() -> None:
    with between(rune()) as both:
        os.write(both.host_in, b'{"type"')
        both.turn()
        assert got(both.plugin_in) == b'{"type"'
        both.turn()
        # Far beyond what is read, in a line that goes on and on.
        for _ in range(5 * 16):
            os.write(both.host_in, b"y" * PIPE)
            both.turn()
            assert got(both.plugin_in) == b"y" * PIPE
        os.write(both.host_in, b"\n" + ASK)
        both.turn()
        assert got(both.plugin_in) == b"\n" + ASK
        told = both.inspection.document()["to_plugin"]
        assert (told["frames"], told["unread"]) == (2, 1)


def test_who_writes_to_nobody_is_told() -> None:
    with between(nexo()) as both:
        both.shut("host_out")
        both.turn()
        with pytest.raises(BrokenPipeError):
            os.write(both.plugin_out, b"x\n")
        assert both.inspection.breach is None


def test_a_plugin_that_has_closed_its_stdin() -> None:
    with between(nexo()) as both:
        both.shut("plugin_in")
        os.write(both.host_in, b"hello\n")
        both.turn()
        assert both.inspection.interest().keys() & {both._stdin} == set()  # nothing to spin on
        os.write(both.plugin_out, MESSAGE)
        both.turn()
        assert got(both.host_out) == MESSAGE


@pytest.mark.parametrize("closed", ["", "plugin_in", "plugin_out"])
def test_who_does_not_listen_is_late_all_the_same(closed: str) -> None:
    with between(nexo()) as both:
        if closed:
            both.shut(closed)
        os.write(both.host_in, b'{"jsonrpc":"2.0","id":1,"method":"initialize"}\n')
        assert both.turn(now := time.monotonic()) is None
        assert both.inspection.due == now + 5.0
        assert both.turn(now + 5.0) == VIOLATION
        assert both.inspection.breach is not None and both.inspection.breach.violation.cause == "handshake"


def test_who_was_sent_the_plugins_stdout_cannot_keep_us() -> None:
    """It writes faster than we read, for ever, and the plugin is gone."""
    with between(nexo(), burst=math.inf) as both:
        for fd in (both.plugin_out, both.host_out):
            os.set_blocking(fd, True)
        sink = subprocess.Popen(["/bin/cat"], stdin=both.host_out, stdout=subprocess.DEVNULL)
        with sink, subprocess.Popen(["/usr/bin/yes", MESSAGE[:-1]], stdout=both.plugin_out) as accomplice:
            try:
                while select.select([both.inspection.to_host._read], [], [], 0.1)[0] == []:
                    pass
                finishing = threading.Thread(target=both.inspection.finish, args=(10.0,), daemon=True)
                finishing.start()
                finishing.join(30)
                assert accomplice.poll() in (None, -signal.SIGPIPE)
                assert not finishing.is_alive() and both.inspection.to_host.passed >= 4096
            finally:
                accomplice.kill()
                sink.kill()


def test_the_clock_of_the_handshake() -> None:
    with between(rune()) as both:
        assert both.turn(now=0.0) is None and both.inspection.due == math.inf
        os.write(both.host_in, ASK[:10])
        assert both.turn(now=100.0) is None and both.inspection.due == math.inf  # it has not been asked yet
        os.write(both.host_in, ASK[10:])
        assert both.turn(now=200.0) is None and both.inspection.due == 202.0
        assert both.turn(now=201.9) is None
        os.write(both.plugin_out, HANDSHAKE)
        assert both.turn(now=201.99) is None and both.inspection.due == math.inf
        assert both.inspection.handshake == pytest.approx(1.99)
        assert both.turn(now=1000.0) is None


@pytest.mark.parametrize(
    ("granted", "seconds", "limit"), [(None, 2.0, None), (9.0, 2.0, None), (0.5, 0.5, "handshake")]
)
def test_a_handshake_that_comes_too_late(granted: float | None, seconds: float, limit: str | None) -> None:
    with between(rune(), Limits(handshake=granted)) as both:
        os.write(both.host_in, ASK)
        assert both.turn(now=10.0) is None and both.inspection.due == 10.0 + seconds
        assert both.turn(now=10.0 + seconds) == VIOLATION
        os.write(both.plugin_out, HANDSHAKE)
        assert both.turn(now=11.0 + seconds) == VIOLATION
        assert got(both.host_out) == b""
        breach = both.inspection.breach
        assert breach is not None and breach.violation.code == "timeout"
        assert (breach.phase, breach.limit) == ("handshake", limit)


def test_a_host_that_is_gone_waits_for_nothing() -> None:
    with between(rune()) as both:
        os.write(both.host_in, ASK)
        both.turn(now=0.0)
        both.shut("host_out")
        assert both.turn(now=0.5) is None and both.turn(now=50.0) is None
        assert both.inspection.due == math.inf and not both.inspection.left_waiting


def test_a_flood() -> None:
    with between(nexo(), burst=3, per_second=0.001) as both:
        os.write(both.plugin_out, b"a\n" + 2 * MESSAGE)  # what is withheld counts too
        assert both.turn() is None
        os.write(both.plugin_out, MESSAGE)
        assert both.turn() == VIOLATION
        both.finish()
        assert got(both.host_out) == 2 * MESSAGE
        breach = both.inspection.breach
        assert breach is not None and breach.violation.cause == "flood"


@pytest.mark.parametrize(
    ("limits", "name", "most"),
    [(Limits(output=10), "output", 10), (Limits(output_lines=2), "output_lines", 2)],
)
def test_limits_of_output_count_both_streams(limits: Limits, name: str, most: int) -> None:
    void = os.open("/dev/null", os.O_WRONLY)
    relay = Relay(void, size=limits.output, lines=limits.output_lines)
    try:
        with between(nexo(), limits, beside=relay) as both:
            os.write(relay.end, b"err\n")
            os.write(both.plugin_out, b"abcde\n")
            for _ in range(2):
                poll = select.poll()
                for fd, events in relay.interest().items():
                    poll.register(fd, events)
                assert relay.look(dict(poll.poll(0)), time.monotonic()) is None
            assert both.turn() is None and both.inspection.peaks() == {name: most}
            os.write(both.plugin_out, b"\n")
            assert both.turn() == name
            assert both.inspection.exceeded == name and both.inspection.peaks() == {name: most + 1}
    finally:
        relay.close()
        os.close(void)


# --- the real thing ----------------------------------------------------------------------------------------

MANIFEST = (
    manifests.nexo("tried", "COMMAND", version="1.2.3") + "args = ARGS\n[plugin.sandbox]\nenabled = true\n"
)

# Speaks rune, and does what its one argument says.
PLUGIN = """#!/usr/bin/python3 -IS
import json, os, sys, time
what = sys.argv[1]
def say(message):
    os.write(1, (message if isinstance(message, bytes) else json.dumps(message).encode() + b"\\n"))
hello = {"type": "handshake", "manifest": {"plugin_id": "tried", "plugin_version": "1",
    "protocol_version": "rterm.plugin.v1", "exposed_tools": ["t"]}}
if what == "banner":
    say(b"Welcome!\\n")
if what == "endless":
    while True:
        os.write(1, b"x" * 65536)
if what == "gone":
    sys.exit(3)
if what == "gone early":
    sys.stdin.readline()
    sys.exit(3)
if what == "silent":
    sys.stdin.read()
    time.sleep(1000)
sys.stdin.readline()
if what == "half":
    say(json.dumps(hello).encode()[:30])
    sys.exit(4)
if what == "somebody":
    hello["manifest"]["plugin_id"] = "somebody"
if what == "version":
    hello["manifest"]["protocol_version"] = "rterm.plugin.v0"
if what == "capable":
    hello["manifest"]["capabilities"] = ["everything"]
say(hello)
request = json.loads(sys.stdin.readline())
answer = {"type": "response", "request_id": request["request_id"], "status": "ok", "output": request["input"]}
if what == "other":
    answer["request_id"] = "other"
if what == "nan":
    answer["output"] = float("nan")
if what == "bare":
    say(json.dumps(answer).encode())
else:
    say(answer)
if what == "twice":
    say(answer)
if what == "stays":
    sys.stdin.read()
    say(b"\\n")
sys.exit(7 if what == "seven" else 0)
"""
REQUEST = b'{"type":"request","request_id":"r1","tool_name":"t","context":{},"input":[1,2]}\n'


@pytest.fixture
def rune_dir(plugin_dir: Path, write_file: Write) -> Path:
    write_file(plugin_dir / "run", PLUGIN, 0o755)
    bundle = {
        "plugin_id": "tried",
        "plugin_version": "1",
        "protocol_version": "rterm.plugin.v1",
        "process": {"command": "./run"},
        "tools": [{"name": "t"}],
    }
    write_file(plugin_dir / "rterm-plugin.json", json.dumps(bundle))
    return plugin_dir


@pytest.fixture
def nexo_dir(plugin_dir: Path, write_file: Write) -> Callable[..., Path]:
    def make(*argv: str) -> Path:
        text = MANIFEST.replace("COMMAND", argv[0]).replace("ARGS", json.dumps(argv[1:]))
        write_file(plugin_dir / "nexo-plugin.toml", text)
        return plugin_dir

    return make


class Ran(NamedTuple):
    status: int
    out: bytes
    err: str
    report: Mapping[str, Any]


def inspected(caller: Caller, where: Path, *words: str, said: bytes, options: tuple[str, ...] = ()) -> Ran:
    """Run it as a host would that says all it has to say and then reads."""
    report = caller.home / "report.json"
    for _ in range(5):
        process = caller.start("exec", "--inspect", "--report", report, *options, where, "--", *words)
        with process:
            try:
                out, err = process.communicate(said, timeout=120)
            except BaseException:
                process.kill()
                raise
        ran = Ran(process.returncode, out, err.decode(), json.loads(report.read_text()))
        # A contract may give no more than two seconds, in which a busy machine may not start an interpreter.
        if "silent" in words or ran.report["outcome"]["cause"] != "handshake":
            break
    return ran


BAD = {
    "banner": ("malformed_response", "handshake", "bad_json", 137, 0),
    "endless": ("malformed_response", "handshake", "frame_too_large", 137, 0),
    "somebody": ("handshake_failed", "handshake", "plugin_id_mismatch", 137, 0),
    "version": ("protocol_version_mismatch", "handshake", "protocol_version", 137, 0),
    "capable": ("capability_not_allowed", "handshake", "bundle", 137, 0),
    "silent": ("timeout", "handshake", "handshake", 124, 0),
    "half": ("malformed_response", "handshake", "bad_json", 137, 0),
    "gone early": ("crashed", "handshake", "no_handshake", 3, 0),
    "other": ("malformed_response", "run", "request_id", 137, 1),
    "nan": ("malformed_response", "run", "bad_number", 137, 1),
}


@pytest.mark.usefixtures("nothing_left")
@one_case(("what", "expected"), BAD.items(), ids=BAD)
def test_each_breach(
    runner_as: Caller, rune_dir: Path, what: str, expected: tuple[str, str, str, int, int]
) -> None:
    code, phase, cause, status, lines = expected
    # Time for a slow machine, except where it has to run out.
    ran = inspected(runner_as, rune_dir, what, said=ASK + REQUEST, options=_PATIENT.get(what, ()))
    outcome = ran.report["outcome"]
    assert (outcome["code"], outcome["phase"], outcome["cause"]) == (code, phase, cause)
    assert (ran.status, ran.report["exit"]["status"]) == (status, status)
    assert ran.out.count(b"\n") == lines == ran.report["inspection"]["to_host"]["frames"]
    if code == "crashed":
        assert ran.err == "" and ran.report["inspection"]["violation"] is None
        assert ran.report["exit"]["ended_by"] is None
    else:
        assert ran.err.startswith(f"runner: {code}: ") and len(ran.err.splitlines()) <= 2
        assert ran.report["inspection"]["violation"]["code"] == code
        assert ran.report["exit"]["ended_by"] == "violation"


_PATIENT: Mapping[str, tuple[str, ...]] = {"silent": ("--limit", "handshake=200ms")}


def test_the_limit_of_the_handshake_is_named(runner_as_user: Caller, rune_dir: Path) -> None:
    ran = inspected(runner_as_user, rune_dir, "silent", said=ASK, options=("--limit", "handshake=100ms"))
    assert ran.report["limits_hit"] == ["handshake"]
    (limit,) = [one for one in ran.report["limits"] if one["name"] == "handshake"]
    assert (limit["enforced_by"], limit["effective"]) == ("clock", 0.1)


@pytest.mark.usefixtures("nothing_left")
@one_case(("what", "status"), [("fine", 0), ("bare", 0), ("seven", 7), ("gone", 3), ("stays", 0)])
def test_who_keeps_to_the_contract_ends_as_without(
    runner_as: Caller, rune_dir: Path, what: str, status: int
) -> None:
    said = b"" if what == "gone" else ASK + REQUEST
    ran = inspected(runner_as, rune_dir, what, said=said)
    plain = runner_as("exec", rune_dir, "--", what, input=said)
    assert (ran.status, ran.out.decode(), ran.err) == (plain.returncode, plain.stdout, plain.stderr)
    assert ran.status == status and ran.report["inspection"]["violation"] is None
    assert ran.report["inspection"]["to_host"]["bytes"] == len(ran.out)
    assert (ran.report["inspection"]["handshake"] is None) is (what == "gone")


# Answers what it is about to be asked, as somebody else.
_EARLY = """#!/usr/bin/python3 -IS
import json, os, sys
other = {"manifest": {"plugin": {"id": "somebody", "version": "1"}}}
os.write(1, json.dumps({"jsonrpc": "2.0", "id": 1, "result": other}).encode() + b"\\n")
sys.stdin.read()
"""


@pytest.mark.usefixtures("nothing_left")
def test_no_answer_reaches_the_host_before_its_question(
    runner_as: Caller, nexo_dir: Callable[..., Path], write_file: Write
) -> None:
    folder = nexo_dir("./early")
    write_file(folder / "early", _EARLY, 0o755)
    ran = inspected(runner_as, folder, said=b"")
    assert (ran.status, ran.out) == (0, b"")
    assert ran.report["inspection"]["strays"] == {"unasked": 1}
    assert ran.report["inspection"]["to_host"]["withheld"] > 0
    # The control: without --inspect the host finds the forged answer.
    plain = runner_as("exec", folder, input=b"")
    assert json.loads(plain.stdout)["result"]["manifest"]["plugin"]["id"] == "somebody"


def _traffic(size: int) -> tuple[bytes, bytes]:
    """Lines of every length and kind, none of them a breach; and those of them that are messages."""
    dice = random.Random(4)
    found: list[bytes] = []
    messages: list[bytes] = []
    length = 0
    while length < size:
        kind = dice.random()
        text = "".join(dice.choices('abc \\"é\u2028{}[]0123456789', k=dice.choice((3, 900, 4095, 70_000))))
        if kind < 0.1:
            line = b"log: " + dice.randbytes(dice.randrange(200)).replace(b"\n", b"")
        else:
            message = {"jsonrpc": "2.0", "method": "event", "params": {"text": text}}
            line = json.dumps(message, ensure_ascii=kind < 0.5).encode() + (b"\r" if kind > 0.9 else b"")
            messages.append(line)
        found.append(line)
        length += len(line) + 1
    last = MESSAGE[:-1]
    return b"\n".join([*found, last]), b"\n".join([*messages, last])


@pytest.mark.usefixtures("nothing_left")
@one_case("stream", ["pipe", "socket"])
def test_eight_mebibytes_there_and_back(
    runner_as: Caller, nexo_dir: Callable[..., Path], stream: str
) -> None:
    """In odd pieces, while it comes back; the end of it comes through too."""
    traffic, messages = _traffic(8 << 20)
    report = runner_as.home / "report.json"
    arguments = ("exec", "--inspect", "--report", str(report), nexo_dir("/usr/bin/cat"))
    with _streams(stream) as (stdin, to_runner, stdout, from_runner):
        process = runner_as.start(*arguments, stdin=stdin, stdout=stdout)
        os.close(stdin)
        os.close(stdout)
        dice, sent, came = random.Random(5), 0, bytearray()
        os.set_blocking(to_runner, False)
        until = time.monotonic() + 300
        with process:
            while time.monotonic() < until:
                poll = select.poll()
                poll.register(from_runner, select.POLLIN)
                if sent < len(traffic):
                    poll.register(to_runner, select.POLLOUT)
                ready = dict(poll.poll(60_000))
                if to_runner in ready:
                    piece = traffic[sent : sent + dice.choice((1, 17, 4097, 65_537))]
                    sent += os.write(to_runner, piece)
                    if sent == len(traffic):
                        os.close(to_runner)
                if from_runner in ready:
                    data = os.read(from_runner, dice.choice((1, 1000, 100_000)))
                    if not data:
                        break
                    came += data
            assert process.wait(60) == 0
    assert bytes(came) == messages
    inspection = json.loads(report.read_text())["inspection"]
    up, down = inspection["to_plugin"], inspection["to_host"]
    assert (up["bytes"], up["frames"]) == (len(traffic), traffic.count(b"\n") + 1)
    assert (down["bytes"], down["frames"]) == (len(messages), messages.count(b"\n") + 1)
    assert down["withheld"] == up["bytes"] - down["bytes"]
    assert inspection["strays"] == {"not_json": up["frames"] - down["frames"]}


@contextmanager
def _streams(kind: str) -> Iterator[tuple[int, int, int, int]]:
    import socket

    if kind == "pipe":
        stdin, to_runner = os.pipe()
        from_runner, stdout = os.pipe()
    else:
        one, other = socket.socketpair()
        two, another = socket.socketpair()
        stdin, to_runner, from_runner, stdout = one.detach(), other.detach(), two.detach(), another.detach()
    try:
        yield stdin, to_runner, stdout, from_runner
    finally:
        os.close(from_runner)


@pytest.mark.usefixtures("nothing_left")
def test_a_host_that_stops_reading_and_a_plugin_that_never_stops(
    runner_as: Caller, nexo_dir: Callable[..., Path]
) -> None:
    """While nobody reads it stands still; when somebody does, it is a flood, and that ends it."""
    message = '{"jsonrpc":"2.0","method":"x"}'
    report = runner_as.home / "report.json"
    arguments = ("exec", "--inspect", "--report", str(report), nexo_dir("/usr/bin/yes", message))
    with runner_as.start(*arguments, stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        fd = process.stdout.fileno()
        head = os.read(fd, 1000)
        # It stands still when the runner has read nothing more for a while.
        until, still, last = time.monotonic() + 60, 0, -1
        while still < 20 and time.monotonic() < until:
            now = _read_by(process.pid)
            still, last = (still + 1, last) if now == last else (0, now)
            time.sleep(0.02)  # no event says that nothing happens
        assert still == 20
        assert process.poll() is None
        peak = _peak(process.pid)
        pipe = fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
        rest = process.stdout.read()
        assert process.wait(60) == 137
        assert peak < 100 << 20
    came = head + rest
    assert len(came) > pipe and came == (message.encode() + b"\n") * (len(came) // (len(message) + 1))
    outcome = json.loads(report.read_text())["outcome"]
    assert (outcome["code"], outcome["cause"]) == ("malformed_response", "flood")


def _read_by(pid: int) -> int:
    with open(f"/proc/{pid}/io", "rb") as file:
        return int(file.readline().split()[1])


def _peak(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError


@pytest.mark.usefixtures("nothing_left")
def test_a_line_without_an_end_costs_a_line(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    """Of the contract with the longest ones."""
    server = {"command": "/usr/bin/cat", "args": ["/dev/zero"]}
    write_file(plugin_dir / "mcp.json", json.dumps({"mcpServers": {"endless": server}}))
    report = runner_as.home / "report.json"
    command = runner_as.command("exec", "--inspect", "--report", str(report), plugin_dir)
    done = subprocess.run(
        ["/usr/bin/python3", "-ISc", _MEASURED, *command], env=runner_as.environ, cwd="/", capture_output=True
    )
    assert done.stdout == b"", done.stderr
    status, kibibytes = map(int, done.stderr.split()[-2:])
    assert status == 137
    assert kibibytes << 10 < 150 << 20  # an interpreter, its imports, and 16 MiB two or three times
    document = json.loads(report.read_text())
    assert document["outcome"]["cause"] == "frame_too_large"
    assert 16 << 20 <= document["inspection"]["to_host"]["withheld"] <= 17 << 20


# By a small process: what a child of a large one takes is never less than its parent took.
_MEASURED = """
import os, sys
pid = os.fork()
if not pid:
    os.execv(sys.argv[1], sys.argv[1:])
_, status, used = os.wait4(pid, 0)
print(os.waitstatus_to_exitcode(status), used.ru_maxrss, file=sys.stderr)
"""


@pytest.mark.usefixtures("nothing_left")
def test_without_a_cage_too(runner_as: Caller, nexo_dir: Callable[..., Path], write_file: Write) -> None:
    manifest = nexo_dir("/usr/bin/cat") / "nexo-plugin.toml"
    write_file(manifest, manifest.read_text().replace("enabled = true", "enabled = false"))
    policy = write_file(runner_as.home / "policy.toml", 'version = 1\nunsandboxed = "allow"\n', 0o600)
    runner_as.give(policy)
    for said, status in ((MESSAGE + MESSAGE[:-1], 0), (b'{"id":NaN}\n', 137)):
        ran = inspected(runner_as, manifest, said=said, options=("--policy", str(policy)))
        assert (ran.status, ran.out) == (status, said if status == 0 else b"")
        assert ran.report["grant"]["unsandboxed"] is True and "UNSANDBOXED" in ran.err


@pytest.mark.usefixtures("nothing_left")
def test_a_host_that_reads_no_more(runner_as: Caller, nexo_dir: Callable[..., Path]) -> None:
    """The plugin finds its pipe broken at the next word, as if it wrote to the host itself."""
    with runner_as.start("exec", "--inspect", nexo_dir("/usr/bin/cat")) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"hello\n" + MESSAGE)  # the first line does not come back
        process.stdin.flush()
        assert process.stdout.readline() == MESSAGE
        process.stdout.close()
        process.stdin.write(MESSAGE)  # which cat cannot hand on
        process.stdin.flush()
        assert process.wait(60) == 128 + signal.SIGPIPE


def test_without_the_option_nothing_is_imported(runner_as_user: Caller, rune_dir: Path) -> None:
    python = [*runner_as_user.prefix, *runner_as_user.python]
    code = "import sys; sys.argv = ['runner', *sys.argv[1:]]; from runner.cli import main\n"
    code += "try: main()\nexcept SystemExit: pass\n"
    code += "rare = ('runner.launch.inspect.inspection', 'runner.protocol.dialect', 'runner.protocol.wire')\n"
    code += "print(sorted(name for name in rare if name in sys.modules), file=sys.stderr)\n"
    for option, expected in (((), "[]"), (("--inspect",), "runner.launch.inspect.inspection")):
        said = subprocess.run(
            [*python, "-c", code, "exec", *option, os.fspath(rune_dir), "--", "gone"],
            env=runner_as_user.environ,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert expected in said.stderr
