"""Each behaviour of the misbehaving plugin does what its name says, and nothing else. Other tests rely on it.

The tests talk to it directly over pipes, without a cage. The last one runs its manifests in a cage.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Caller
from tests.misbehaviour import (
    BEHAVIOURS,
    CONTRACTS,
    ID,
    PACKAGE,
    PLUGIN,
    REQUESTS,
    TOOL,
    WITH_HEADERS,
    Contract,
    Moment,
    given_to,
    plugin,
)
from tests.tables import one_case, wait_for

pytestmark = pytest.mark.usefixtures("nothing_left")

_SECONDS = 60.0
_MEBI = 1 << 20
_FLOOD_BYTES = 4 * _MEBI  # more than any pipe or buffer holds
_MEMORY_BYTES = 512 * _MEBI  # for the behaviour that allocates without end

INPUT = {"text": "grüße"}
_CALL_ID = 5

HELLO: Mapping[Contract, Mapping[str, Any]] = {
    "rune": {"type": "handshake", "protocol_version": "rterm.plugin.v1"},
    "nexo": {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"nexo_version": "0.1.0"}},
    "mcp": {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"},
        },
    },
    "kaged": {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"api_version": 1}},
    "ainb": {"jsonrpc": "2.0", "id": 1, "method": "plugin/init", "params": {"abi_version": 2}},
    "vai": {
        "protocol": "vai.rpc.v1",
        "type": "hello",
        "role": "host",
        "host": {"name": "test", "version": "1"},
    },
}
CALL: Mapping[Contract, Mapping[str, Any]] = {
    "rune": {
        "type": "request",
        "request_id": "plugin_req_0123456789abcdef",
        "tool_name": TOOL["rune"],
        "context": {},
        "input": INPUT,
    },
    "nexo": {
        "jsonrpc": "2.0",
        "id": _CALL_ID,
        "method": "tool.invoke",
        "params": {"plugin_id": ID, "tool_name": TOOL["nexo"], "args": INPUT, "agent_id": "a"},
    },
    "mcp": {
        "jsonrpc": "2.0",
        "id": _CALL_ID,
        "method": "tools/call",
        "params": {"name": TOOL["mcp"], "arguments": INPUT},
    },
    "kaged": {
        "jsonrpc": "2.0",
        "id": _CALL_ID,
        "method": f"{ID}.{TOOL['kaged']}",
        "params": {**INPUT, "_context": {"agent_path": "primary"}},
    },
    "ainb": {
        "jsonrpc": "2.0",
        "id": _CALL_ID,
        "method": "plugin/cli_dispatch",
        "params": {"namespace": TOOL["ainb"], **given_to("ainb", INPUT)},
    },
    "vai": {
        "protocol": "vai.rpc.v1",
        "type": "request",
        "id": f"req_{_CALL_ID}",
        "op": "tool.invoke",
        "body": given_to("vai", INPUT),
    },
}
# The request to shut down and its answer, in contracts that have one.
SHUTDOWN: Mapping[Contract, tuple[str, Any]] = {
    "nexo": ("shutdown", {"ok": True}),
    "kaged": ("shutdown", {"status": "ok"}),
    "ainb": ("plugin/shutdown", {}),
}
_HEADER = b"Content-Length: "


def pack(contract: Contract, message: Mapping[str, Any]) -> bytes:
    line = json.dumps(message).encode() + b"\n"
    return b"%b%d\r\n\r\n%b" % (_HEADER, len(line), line) if contract in WITH_HEADERS else line


class Talk:
    """A host's end of the plugin's pipes."""

    def __init__(self, process: subprocess.Popen[bytes], contract: Contract, moment: Moment) -> None:
        self.process = process
        self.contract = contract
        self.moment = moment
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr
        self._held = b""

    @property
    def one_shot(self) -> bool:
        return self.contract == "rune"

    def send(self, message: Mapping[str, Any]) -> None:
        self.stdin.write(pack(self.contract, message))
        self.stdin.flush()

    def ask(self) -> None:
        """Send everything up to the message it misbehaves at. It answers earlier messages correctly."""
        if self.moment == "start":
            return
        self.send(HELLO[self.contract])
        if self.moment == "call":
            assert is_hello(self.contract, self.message())
            self.send(CALL[self.contract])

    def line(self) -> bytes:
        """The next line, or the body of the next frame with a header. At the end of the stream, the rest
        without a newline, or nothing."""
        while b"\n" not in self._held:
            data = self.some(self.stdout)
            if not data:
                rest, self._held = self._held, b""
                return rest
            self._held += data
        if self._held.startswith(_HEADER):
            return self.body()
        line, newline, self._held = self._held.partition(b"\n")
        return line + newline

    def body(self) -> bytes:
        while b"\r\n\r\n" not in self._held:
            self._held += self.more(self.stdout)
        header, _, self._held = self._held.partition(b"\r\n\r\n")
        length = int(header.removeprefix(_HEADER))
        while len(self._held) < length:
            self._held += self.more(self.stdout)
        body, self._held = self._held[:length], self._held[length:]
        return body

    def message(self) -> dict[str, Any]:
        line = self.line()
        message = json.loads(line)
        assert isinstance(message, dict)
        return message

    def some(self, stream: Any, most: int = _MEBI) -> bytes:
        if not select.select([stream], [], [], _SECONDS)[0]:
            raise TimeoutError(f"nothing after {self._held[-200:]!r}")
        return os.read(stream.fileno(), most)

    def more(self, stream: Any) -> bytes:
        data = self.some(stream)
        assert data, "the stream has ended"
        return data

    def rest(self) -> bytes:
        """Everything to the end of stdout."""
        output = self._held
        self._held = b""
        while data := self.some(self.stdout):
            output += data
        return output

    def end(self) -> int:
        """Close stdin, wait for the plugin to end and return its status."""
        self.stdin.close()
        return self.process.wait(_SECONDS)

    def sits(self) -> None:
        """Wait until it sleeps or is stopped. It will do nothing more."""
        wait_for(lambda: self.state() in "ST", _SECONDS)
        assert self.process.poll() is None

    def state(self) -> str:
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def takes_no_more(self) -> bool:
        """Whether it has stopped reading: its stdin pipe fills up and stays full."""
        os.set_blocking(self.stdin.fileno(), False)
        written = 0
        while written < _FLOOD_BYTES:
            try:
                written += os.write(self.stdin.fileno(), b" " * 4095 + b"\n")
            except BlockingIOError:
                # A plugin that reads does not sleep while the pipe is full.
                while not select.select([], [self.stdin], [], 0.1)[1]:
                    if self.state() in "ST" and not select.select([], [self.stdin], [], 0.1)[1]:
                        return True
        return False


@contextmanager
def talk(behaviour: str, contract: Contract, moment: Moment | None = None) -> Iterator[Talk]:
    moment = moment or BEHAVIOURS[behaviour]
    process = subprocess.Popen(
        ["/usr/bin/prlimit", f"--as={_MEMORY_BYTES}", str(PLUGIN), behaviour, contract, moment],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
        cwd="/",
        start_new_session=True,
    )
    try:
        with process:
            try:
                yield Talk(process, contract, moment)
            finally:
                if process.returncode is None:  # otherwise the pid may have been reused
                    os.killpg(process.pid, signal.SIGKILL)
    except BrokenPipeError:
        pass  # the buffer could not be flushed to the ended plugin


def is_hello(contract: Contract, message: Mapping[str, Any]) -> bool:
    if contract == "rune":
        return message["type"] == "handshake" and bool(message["manifest"]["plugin_id"] == ID)
    if contract == "nexo":
        return message["id"] == 1 and bool(message["result"]["manifest"]["plugin"]["id"] == ID)
    if contract == "vai":
        return message["type"] == "hello" and bool(message["plugin"]["package_id"] == PACKAGE)
    result = message["result"]
    return message["id"] == 1 and bool((result["serverInfo"] if contract == "mcp" else result)["name"] == ID)


def is_answer(contract: Contract, message: Mapping[str, Any]) -> bool:
    if contract == "rune":
        right = message["request_id"] == CALL["rune"]["request_id"] and message["status"] == "ok"
        return right and bool(message["output"]["input"] == INPUT)
    if contract == "vai":
        right = message["id"] == CALL["vai"]["id"] and message["ok"] is True
        return right and bool(message["body"]["result"]["structured_output"]["input"] == INPUT)
    right = message["id"] == _CALL_ID
    result = message["result"]
    return right and bool((result["structuredContent"] if contract == "mcp" else result)["input"] == INPUT)


def is_right(talk: Talk, message: Mapping[str, Any]) -> bool:
    """Whether it is the correct message at the moment of the behaviour."""
    return (is_hello if talk.moment == "hello" else is_answer)(talk.contract, message)


# --- One check per behaviour -------------------------------------------------------------------------------

Check = Callable[[Talk], None]


def without_header(output: bytes) -> bytes:
    return output.partition(b"\r\n\r\n")[2] if output.startswith(_HEADER) else output


def answers_and_exits(talk: Talk) -> None:
    """A correct answer and a correct shutdown."""
    talk.ask()
    assert is_right(talk, talk.message())
    shuts_down_correctly(talk)


def shuts_down_correctly(talk: Talk) -> None:
    if talk.contract in SHUTDOWN:
        method, result = SHUTDOWN[talk.contract]
        talk.send({"jsonrpc": "2.0", "id": 9, "method": method, "params": {"reason": "host requested"}})
        assert talk.message() == {"jsonrpc": "2.0", "id": 9, "result": result}
    if talk.contract == "vai":  # without an answer
        talk.send({"protocol": "vai.rpc.v1", "type": "shutdown"})
    if talk.one_shot and talk.moment == "call":
        assert talk.rest() == b""  # it ends by itself
    assert (talk.end(), talk.rest()) == (0, b"")


def is_text(*needles: bytes, reads: bool) -> Check:
    """A line that contains `needles` and that json.loads can or cannot read, then a correct shutdown."""

    def check(talk: Talk) -> None:
        talk.ask()
        line = talk.line()
        assert line.endswith(b"\n")
        for needle in needles:
            assert needle in line
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            assert not reads
        else:
            assert reads
        shuts_down_correctly(talk)

    return check


def wrong_id(talk: Talk) -> None:
    talk.ask()
    assert not is_right(talk, talk.message())
    shuts_down_correctly(talk)


def duplicate_key(talk: Talk) -> None:
    talk.ask()
    pairs: list[list[tuple[str, Any]]] = []

    def keep(found: list[tuple[str, Any]]) -> dict[str, Any]:
        pairs.append(found)
        return dict(found)

    message = json.loads(talk.line(), object_pairs_hook=keep)
    assert is_right(talk, message)  # the last one is the right one
    names = [name for name, _ in pairs[-1]]
    [twice] = [name for name in set(names) if names.count(name) == 2]
    values = [value for name, value in pairs[-1] if name == twice]
    assert values[0] != values[1]
    shuts_down_correctly(talk)


def blank(talk: Talk) -> None:
    talk.ask()
    first = talk.line()
    assert first.startswith(b"\n")
    # In a frame with a header the blank line stands before the message in the same body.
    assert is_right(talk, json.loads(first) if talk.contract in WITH_HEADERS else talk.message())
    shuts_down_correctly(talk)


def silent(talk: Talk) -> None:
    talk.ask()
    if talk.moment == "start":
        talk.send(HELLO[talk.contract])
    # It reads to the end of stdin, so its exit proves that it sent nothing.
    assert (talk.end(), talk.rest()) == (0, b"")


def drip(talk: Talk) -> None:
    talk.ask()
    parts = 0
    output = b""
    while not output.endswith(b"}\n"):
        output += talk.more(talk.stdout)
        parts += 1
    assert is_right(talk, json.loads(without_header(output)))
    assert parts > 10
    shuts_down_correctly(talk)


def trickle(talk: Talk) -> None:
    talk.ask()
    output = b"".join(talk.more(talk.stdout) for _ in range(20))
    assert b"\n" not in output and 20 <= len(output) < 10_000


def banner(talk: Talk) -> None:
    talk.ask()
    assert talk.line().startswith(b"Welcome")
    if talk.moment == "start":
        talk.moment = "call"
        talk.ask()
    assert is_right(talk, talk.message())
    shuts_down_correctly(talk)


def half_frame(talk: Talk) -> None:
    talk.ask()
    output = without_header(talk.rest())
    assert output.startswith(b"{") and b"\n" not in output
    assert talk.process.wait(_SECONDS) == 3
    with pytest.raises(ValueError):  # noqa: PT011 -- any reason will do
        json.loads(output)


def unterminated(talk: Talk) -> None:
    talk.ask()
    output = talk.rest()
    assert not output.endswith(b"\n")
    assert is_right(talk, json.loads(without_header(output)))
    assert talk.process.wait(_SECONDS) == 0


def endless_line(talk: Talk) -> None:
    talk.ask()
    total = 0
    while total < _FLOOD_BYTES:
        data = talk.more(talk.stdout)
        assert b"\n" not in data
        total += len(data)


def flood_frames(talk: Talk) -> None:
    talk.ask()
    for _ in range(10_000):
        message = talk.message()
        assert "result" not in message and message.get("type") != "response"


def flood_garbage(talk: Talk) -> None:
    talk.ask()
    for _ in range(10_000):
        with pytest.raises(ValueError):  # noqa: PT011
            json.loads(talk.line())


def flood_stderr(talk: Talk) -> None:
    talk.ask()
    total = 0
    while total < _FLOOD_BYTES:
        total += len(talk.more(talk.stderr))
    assert not select.select([talk.stdout], [], [], 0)[0]


def burst_stderr(talk: Talk) -> None:
    talk.ask()
    total = 0
    while total < 8 * _MEBI:
        if total < 7 * _MEBI:  # more is left than a pipe holds, so the plugin is blocked
            assert not select.select([talk.stdout], [], [], 0)[0]
        total += len(talk.more(talk.stderr))
    assert is_right(talk, talk.message())
    shuts_down_correctly(talk)


def burst_frames(talk: Talk) -> None:
    talk.ask()
    for _ in range(REQUESTS):
        message = talk.message()
        assert "result" not in message and message.get("type") != "response"
    assert is_right(talk, talk.message())
    shuts_down_correctly(talk)


def chatter_after(talk: Talk) -> None:
    talk.ask()
    assert is_right(talk, talk.message())
    for _ in range(_MEBI // 100):
        assert talk.line() == b"y" * 99 + b"\n"
    shuts_down_correctly(talk)


def deaf(talk: Talk) -> None:
    talk.ask()
    if talk.moment != "start":
        assert is_right(talk, talk.message())
    assert talk.takes_no_more()


def storm(talk: Talk) -> None:
    talk.ask()
    assert is_right(talk, talk.message())
    seen = [talk.message() for _ in range(REQUESTS)]
    ids = {message["request_id" if talk.one_shot else "id"] for message in seen}
    assert len(ids) == REQUESTS
    assert talk.takes_no_more()


def twice(talk: Talk) -> None:
    talk.ask()
    first = talk.message()
    assert is_right(talk, first)
    assert talk.message() == first
    shuts_down_correctly(talk)


def late(talk: Talk) -> None:
    talk.ask()
    # The plugin has read the request and keeps the answer back.
    assert wait_for(lambda: not _unread(talk.stdin), _SECONDS)
    talk.sits()
    assert not select.select([talk.stdout], [], [], 0)[0]
    if talk.one_shot:
        talk.stdin.close()
        assert is_right(talk, json.loads(talk.rest()))
        assert talk.process.wait(_SECONDS) == 0
        return
    if talk.contract == "vai":
        talk.send({"protocol": "vai.rpc.v1", "type": "cancel", "request_id": CALL["vai"]["id"]})
        assert is_right(talk, talk.message())
    else:
        talk.send({"jsonrpc": "2.0", "id": 8, "method": "no/such"})
        assert is_right(talk, talk.message())
        assert talk.message()["error"]["code"] == -32601
    shuts_down_correctly(talk)


def _unread(pipe: Any) -> int:
    found: int
    (found,) = struct.unpack("i", fcntl.ioctl(pipe.fileno(), termios.FIONREAD, b"\0" * 4))
    return found


def ends_with(code: int, *, answered: bool, err: bytes = b"") -> Check:
    def check(talk: Talk) -> None:
        talk.ask()
        if answered:
            assert is_right(talk, talk.message())
        assert talk.rest() == b""
        assert talk.process.wait(_SECONDS) == code
        assert talk.stderr.read() == err

    return check


def orphan(talk: Talk) -> None:
    talk.ask()
    assert is_right(talk, talk.message())
    assert talk.process.wait(_SECONDS) == 0
    assert not select.select([talk.stdout], [], [], 0.2)[0]  # no end of file: the orphan has it open
    os.killpg(talk.process.pid, signal.SIGKILL)  # the orphan is still in this process group
    assert talk.rest() == b""


def close_stdout(talk: Talk) -> None:
    talk.ask()
    assert talk.rest() == b""
    talk.sits()


def close_stdin(talk: Talk) -> None:
    talk.ask()
    assert is_hello(talk.contract, talk.message())
    with pytest.raises(BrokenPipeError):
        talk.send(CALL[talk.contract])
    talk.sits()


def oom(talk: Talk) -> None:
    talk.ask()
    assert talk.rest() == b""
    assert talk.process.wait(_SECONDS) == 1
    assert b"MemoryError" in talk.stderr.read()


def stop(talk: Talk) -> None:
    talk.ask()
    assert wait_for(lambda: talk.state() == "T", _SECONDS)


def stubborn(talk: Talk) -> None:
    if talk.moment == "start":
        talk.moment = "call"
    talk.ask()
    assert is_right(talk, talk.message())
    if talk.contract in SHUTDOWN:
        talk.send({"jsonrpc": "2.0", "id": 9, "method": SHUTDOWN[talk.contract][0]})
    if talk.contract == "vai":
        talk.send({"protocol": "vai.rpc.v1", "type": "shutdown"})
    talk.stdin.close()
    talk.process.terminate()
    talk.process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        talk.process.wait(0.3)
    assert not select.select([talk.stdout], [], [], 0)[0]


CHECKS: Mapping[str, Check] = {
    "good": answers_and_exits,
    "nan": is_text(b"NaN", reads=True),  # only Python's json accepts it
    "infinity": is_text(b"-Infinity", reads=True),
    "overflow": is_text(b"1e999", reads=True),
    "huge_int": is_text(b"9" * 5000, reads=False),
    "int_65_bit": is_text(b"18446744073709551616", reads=True),
    "deep": is_text(b"[" * 100_000, reads=False),
    "deep_129": is_text(b"[" * 129, reads=True),
    "surrogate": is_text(rb'"\ud800"', reads=True),
    "not_utf8": is_text(b'"\xff\xfe"', reads=False),
    "large": is_text(b"x" * (2 * _MEBI), reads=True),
    "bom": is_text(b"\xef\xbb\xbf{", reads=True),  # Python's json detects the encoding of bytes
    "blank": blank,
    "crlf": is_text(b"}\r\n", reads=True),
    "trailing": is_text(b"} {}\n", reads=False),
    "array": is_text(b"[{", b"}]\n", reads=True),
    "duplicate_key": duplicate_key,
    "wrong_id": wrong_id,
    "silent": silent,
    "drip": drip,
    "trickle": trickle,
    "banner": banner,
    "half_frame": half_frame,
    "unterminated": unterminated,
    "endless_line": endless_line,
    "flood_frames": flood_frames,
    "flood_garbage": flood_garbage,
    "flood_stderr": flood_stderr,
    "burst_stderr": burst_stderr,
    "burst_frames": burst_frames,
    "chatter_after": chatter_after,
    "deaf": deaf,
    "storm": storm,
    "twice": twice,
    "late": late,
    "exit_failing": ends_with(3, answered=False, err=b"cannot open the database\n"),
    "exit_zero": ends_with(0, answered=False),
    "killed": ends_with(-signal.SIGKILL, answered=False),
    "answer_and_exit": ends_with(0, answered=True),
    "answer_and_fail": ends_with(3, answered=True),
    "orphan": orphan,
    "close_stdout": close_stdout,
    "close_stdin": close_stdin,
    "oom": oom,
    "stop": stop,
    "stubborn": stubborn,
}


def test_every_behaviour_is_checked() -> None:
    assert set(CHECKS) == set(BEHAVIOURS)


# Every behaviour in one contract. In the others the one whose answer differs most from contract to contract.
CASES: tuple[tuple[str, Contract], ...] = (
    *((behaviour, "nexo") for behaviour in CHECKS),
    *(("late", contract) for contract in CONTRACTS if contract != "nexo"),
)


@pytest.mark.parametrize(("behaviour", "contract"), CASES)
def test_at_its_usual_moment(behaviour: str, contract: Contract) -> None:
    with talk(behaviour, contract) as conversation:
        CHECKS[behaviour](conversation)


OTHER_MOMENTS: Mapping[str, Moment] = {
    "half_frame": "hello",
    "silent": "start",
    "banner": "hello",
    "deaf": "call",
    "exit_failing": "hello",
    "exit_zero": "start",
    "stubborn": "call",
}


@pytest.mark.parametrize("behaviour", OTHER_MOMENTS)
def test_at_another_moment(behaviour: str) -> None:
    with talk(behaviour, "nexo", OTHER_MOMENTS[behaviour]) as conversation:
        CHECKS[behaviour](conversation)


def test_a_correct_plugin_reads_what_it_is_sent() -> None:
    """The control of the tests that use `takes_no_more`."""
    with talk("good", "nexo", "hello") as conversation:
        conversation.ask()
        assert is_right(conversation, conversation.message())
        assert not conversation.takes_no_more()


@one_case("contract", CONTRACTS)
def test_in_the_cage(runner_as: Caller, plugin_dir: Path, contract: Contract) -> None:
    """The manifests are valid, and their arguments reach the plugin."""
    manifest = plugin(plugin_dir, "exit_failing", contract, "call")
    asked = [HELLO[contract], CALL[contract]]
    done = runner_as("exec", manifest, input=b"".join(pack(contract, message) for message in asked))
    assert (done.returncode, done.stderr) == (3, "cannot open the database\n")
    word = {"rune": "handshake", "vai": "package_id"}.get(contract, "jsonrpc")
    assert done.stdout.count(word) == 1
