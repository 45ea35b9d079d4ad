"""runner call: what is on stdout, what on stderr, what is returned, and what is reported."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from runner.contracts.registry import all_kinds
from runner.outcome import EXIT, Code
from tests import misbehaviour
from tests.conftest import ROOT, Caller
from tests.manifests import nexo
from tests.runner.launch.test_report import faults
from tests.tables import Done, Line, check_rows, run_lines

pytestmark = pytest.mark.usefixtures("nothing_left")

Write = Callable[..., Path]
Copy = Callable[[str], Path]

PLUGINS = ROOT / "tests/plugins"
_SECONDS = 60.0


@pytest.fixture
def copied(plugin_dir: Path) -> Copy:
    """One of tests/plugins, where a dropped uid can read it."""

    def copy(name: str) -> Path:
        folder = plugin_dir / name
        shutil.copytree(PLUGINS / name, folder)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
        return folder

    return copy


# A nexo plugin in a few lines: what it does when its tool is called is `{call}`, and `{hello}` comes first.
SCRIPT = """\
#!/usr/bin/python3 -I
import json, os, sys, time

def send(**message):
    sys.stdout.write(json.dumps(dict(jsonrpc="2.0", **message)) + "\\n")
    sys.stdout.flush()

calls = 0
{hello}
for line in sys.stdin:
    message = json.loads(line)
    if message["method"] == "initialize":
        tools = [dict(name="own_tool", description="Own.", input_schema=dict(type="object"))]
        plugin = dict(id="own", version="1.0.0", name="Own")
        result = dict(manifest=dict(plugin=plugin), server_version="1", tools=tools)
    elif message["method"] == "tool.invoke":
        calls += 1
        result = dict(calls=calls)
        {call}
    else:
        result = dict(ok=True)
    send(id=message["id"], result=result)
    if message["method"] == "shutdown":
        break
"""
MANIFEST = nexo("own") + '[plugin.extends]\ntools = ["own_tool"]\n'


def own(folder: Path, write_file: Write, *, hello: str = "pass", call: str = "pass", more: str = "") -> Path:
    write_file(folder / "run", SCRIPT.format(hello=hello, call=call), 0o755)
    write_file(folder / "nexo-plugin.toml", MANIFEST + more)
    return folder


# --- what it answers ---------------------------------------------------------------------------------------


def test_the_result_is_all_there_is_on_stdout(runner_as: Caller, copied: Copy) -> None:
    text = 'grüße "…" \\ \t 🦎'
    done = runner_as("call", copied("nexo_bare"), "bare_echo", "--input", json.dumps({"text": text}))
    assert (done.returncode, done.stderr) == (0, "")
    params = {"plugin_id": "bare", "tool_name": "bare_echo", "args": {"text": text}, "agent_id": "runner"}
    result = {"content": [{"type": "text", "text": text}], "is_error": False, "params": params}
    assert done.stdout == json.dumps(result, ensure_ascii=False) + "\n"


def test_it_is_utf_8_whatever_the_locale(runner_as_user: Caller, copied: Copy) -> None:
    done = runner_as_user(
        *("call", copied("rune_echo"), "echo", "--input", '{"a": "ü"}'),
        env={"LC_ALL": "C", "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    )
    assert (done.stdout, done.stderr) == ('{"input": {"a": "ü"}, "context": {}}\n', "")


CONTENT = [{"role": "user", "content": "one two"}]


NEXO_KINDS: list[tuple[str, str, Any, dict[str, Any]]] = [
    ("tool", "bare_echo", {"text": "x"}, {"is_error": False}),
    ("hook", "bare_hook", {"body": "a secret"}, {"abort": True, "decision": "block"}),
    ("hook", "bare_hook", None, {}),
    ("channel", "start", {"instance": "i"}, {"ok": True}),
    ("channel", "send_outbound", {"msg": {"to": "you"}}, {"message_id": "m-1"}),
    ("llm", "bare_llm", {"model": "m", "messages": CONTENT}, {"finish_reason": {"kind": "stop"}}),
    ("memory", "vector_upsert", {"collection": "c", "records": []}, {"count": 0}),
    ("method", "memory.vector_delete", {"collection": "c", "ids": []}, {"count": 0}),
]


def asking(kind: str, name: str, given: Any, *words: str | Path) -> Line:
    return Line(
        ("call", "--kind", kind, *words, name, *(() if given is None else ("--input", json.dumps(given))))
    )


def test_each_kind_of_nexo(runner_as_user: Caller, copied: Copy) -> None:
    plugin = copied("nexo_bare")
    lines = [asking(kind, name, given, plugin) for kind, name, given, _ in NEXO_KINDS]

    def check(row: tuple[str, str, Any, dict[str, Any]], done: Done) -> None:
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout).items() >= row[3].items()

    check_rows(zip(NEXO_KINDS, run_lines(runner_as_user, lines), strict=True), check)


MCP_KINDS: list[tuple[str, str, Any, str]] = [
    ("tool", "echo", {"a": [1, None]}, '"structuredContent": {"a": [1, null]}'),
    ("tool", "echo", None, '"structuredContent": {}'),
    ("prompt", "greet", {"who": "Ada"}, '"text": "Greet Ada."'),
    ("resource", "bare://note", None, '"text": "a note"'),
    ("method", "resources/list", None, '"uri": "bare://note"'),
]


def test_each_kind_of_mcp(runner_as_user: Caller, copied: Copy) -> None:
    plugin = copied("mcp_bare")
    rows = [(era, row) for era in ("modern", "legacy") for row in MCP_KINDS]
    lines = [asking(*row[:3], "--server", era, plugin) for era, row in rows]

    def check(row: tuple[str, tuple[str, str, Any, str]], done: Done) -> None:
        assert (done.returncode, done.stderr) == (0, "")
        assert row[1][3] in done.stdout and len(done.stdout.splitlines()) == 1

    check_rows(zip(rows, run_lines(runner_as_user, lines), strict=True), check)


def test_all_kinds_are_tried() -> None:
    # Events: test_events.py. Renders and actions: tests/runner/contracts/ainb. Exports, compactors and
    # harnesses: tests/runner/contracts/vai.
    assert set(all_kinds()) == {
        "tool",
        "hook",
        "channel",
        "llm",
        "memory",
        "event",
        "method",
        "prompt",
        "resource",
        "render",
        "export",
        "compactor",
        "harness",
        "action",
    }


def test_the_context_and_the_configuration_are_sent_along(runner_as_user: Caller, copied: Copy) -> None:
    plugin = copied("nexo_bare")
    words = ("--context", '{"agent_id": "ada"}')
    done = runner_as_user("call", plugin, "bare_echo", "--input", '{"text": "x"}', *words)
    assert json.loads(done.stdout)["params"]["agent_id"] == "ada"
    done = runner_as_user("call", plugin, "bare_seen", "--config", '{"greeting": "hi"}')
    assert json.loads(done.stdout)["config"] == {"greeting": "hi"}
    done = runner_as_user("call", plugin, "bare_seen", "--config", '{"greeting": 5}')
    assert done.returncode == EXIT["handshake_failed"] and "(config_invalid)" in done.stderr


# --- input -------------------------------------------------------------------------------------------------


def test_input_from_a_word_a_file_and_stdin(runner_as: Caller, copied: Copy, write_file: Write) -> None:
    plugin = copied("rune_echo")
    write_file(plugin / "input.json", b'{"a": "\xc3\xbc"}\n')
    for word, stdin in (
        ('{"a": "ü"}', None),
        (f"@{plugin / 'input.json'}", None),
        ("-", '{"a": "ü"}'),
    ):
        done = runner_as("call", plugin, "echo", "--input", word, input=stdin)
        assert (done.stdout, done.stderr) == ('{"input": {"a": "ü"}, "context": {}}\n', "")


def test_large_input(runner_as_user: Caller, copied: Copy, write_file: Write, plugin_dir: Path) -> None:
    """As much as the contract takes goes through; what is longer is not sent."""
    text = "x" * (3 << 20)
    file = write_file(plugin_dir / "large.json", json.dumps({"text": text}))
    done = runner_as_user("call", "--server", "modern", copied("mcp_bare"), "echo", "--input", f"@{file}")
    assert json.loads(done.stdout)["structuredContent"] == {"text": text}
    done = runner_as_user("call", copied("nexo_bare"), "bare_echo", "--input", f"@{file}")
    assert done.returncode == EXIT["invalid_call"] and "3145" in done.stderr
    assert len(done.stderr) < 1000 and done.stdout == ""


WRONG_WORDS: list[tuple[tuple[str, ...], str]] = [
    (("call", "{p}"), "runner tools MANIFEST lists"),
    (("call",), "required: MANIFEST, NAME"),
    (("call", "{p}", ""), "NAME is empty"),
    (("call", "{p}", '{"text": "x"}'), "goes behind --input"),
    (("call", "{p}", "echo", '{"text": "x"}'), "goes behind --input"),
    (("call", "{p}", "echo", "--input", "hello"), """write text as '"text"'"""),
    (("call", "{p}", "echo", "--input", "{p}"), "to read the file of that name write --input @"),
    (("call", "{p}", "echo", "--input", "{'a': 1}"), "this is not JSON: Expecting property name"),
    (("call", "{p}", "echo", "--input", '{"a": NaN}'), "NaN is not a number in JSON"),
    (("call", "{p}", "echo", "--input", "[" * 200 + "]" * 200), "nested more than 128 deep"),
    (("call", "{p}", "echo", "--input", "@/nonexistent"), "--input @/nonexistent: No such file"),
    (("call", "{p}", "echo", "--input", "@/tmp"), "--input @/tmp: Is a directory"),
    (("call", "{p}", "echo", "--input", ""), "this is not JSON"),
    (("call", "{p}", "echo", "--input", "-", "--config", "-"), "only one of --input"),
    (("call", "{p}", "echo", "--context", "[]"), "it has to be a JSON object"),
    (("call", "{p}", "echo", "--timeout", "soon"), "--timeout soon: 'soon' is not a duration"),
    (("call", "{p}", "echo", "--timeout", "0"), "--timeout 0"),
    (("call", "{p}", "echo", "--timeout", "-1"), "--timeout"),
    (("call", "{p}", "echo", "--kind", "spell"), "--kind"),
    (("call", "{p}", "echo", "--report", "1"), "descriptors 0 and 1"),
    (("call", "{p}", "echo", "--events", "/dev/stdout"), "descriptors 0 and 1"),
    (("call", "{p}", "echo", "--events"), "a file, or the number of an open descriptor"),
    (("call", "--events", "{p}", "echo"), "a file, or the number of an open descriptor"),
    (("tools", "--events", "{p}"), "a file, or the number of an open descriptor"),
    (("call", "{p}", "echo", "--report", "/nonexistent/r"), "/nonexistent does not exist"),
    (("call", "{p}", "echo", "--limit", "memroy=1G"), "did you mean 'memory'?"),
    (("call", "{p}", "echo", "--input", "\x1b[31m"), r"--input: this is not JSON"),
]


def test_wrong_words_are_one_line(runner_as_user: Caller, copied: Copy) -> None:
    plugin = str(copied("rune_echo"))
    lines = [Line([plugin if word == "{p}" else word for word in words]) for words, _ in WRONG_WORDS]

    def check(row: tuple[tuple[str, ...], str], done: Done) -> None:
        assert (done.returncode, done.stdout) == (2, "")
        assert row[1] in done.stderr and len(done.stderr.splitlines()) == 1
        assert done.stderr.rstrip("\n").isprintable()

    check_rows(zip(WRONG_WORDS, run_lines(runner_as_user, lines), strict=True), check)


def test_wrong_words_to_the_real_program(runner_as: Caller) -> None:
    done = runner_as("call", "/nonexistent", "echo", "--timeout", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("runner call: ") and "--timeout 0: " in done.stderr


# --- every way to fail -------------------------------------------------------------------------------------

RUNE = {
    "plugin_id": "r",
    "plugin_version": "1",
    "protocol_version": "rterm.plugin.v1",
    "process": {"command": "./run"},
    "tools": [{"name": "echo"}],
}


def rune(folder: Path, write_file: Write, listed: Sequence[str] = (), **said: Any) -> Path:
    """A bundle whose plugin says of itself what it is told to say."""
    identity = {"plugin_id": "r", "plugin_version": "1", "protocol_version": "rterm.plugin.v1"}
    manifest = {**identity, "exposed_tools": ["echo"], **said}
    handshake = json.dumps({"type": "handshake", "manifest": manifest})
    write_file(folder / "run", f"#!/bin/sh\nread -r line\necho '{handshake}'\nread -r line\n", 0o755)
    write_file(folder / "rterm-plugin.json", json.dumps({**RUNE, "capabilities": list(listed)}))
    return folder


class Way(NamedTuple):
    code: Code
    phase: str
    said: str  # on stderr, as a pattern
    make: Callable[[Path, Write], Path]
    name: str = "own_tool"
    options: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    tail: str = ""  # the plugin's last words


def misbehaving(
    behaviour: str, contract: misbehaviour.Contract, moment: misbehaviour.Moment | None = None
) -> Callable[[Path, Write], Path]:
    def make(folder: Path, write_file: Write) -> Path:
        return misbehaviour.plugin(folder, behaviour, contract, moment)

    return make


def bare(name: str) -> Callable[[Path, Write], Path]:
    def make(folder: Path, write_file: Write) -> Path:
        shutil.copytree(PLUGINS / name, folder, dirs_exist_ok=True)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
        return folder

    return make


def _without_program(folder: Path, write_file: Write) -> Path:
    own(folder, write_file)
    (folder / "run").unlink()
    return folder


def _without_version(folder: Path, write_file: Write) -> Path:
    own(folder, write_file)
    write_file(folder / "nexo-plugin.toml", MANIFEST.replace('version = "1.0.0"\n', ""))
    return folder


def _declaring(folder: Path, write_file: Write) -> Path:
    """What its bundle lists and it declares; beside a policy that lets nobody declare anything."""
    text = (ROOT / "policies/default.toml").read_text()
    assert 'declare = ["*"]' in text
    write_file(folder / "policy.toml", text.replace('declare = ["*"]', "declare = []"))
    return rune(folder, write_file, ["a:read"], capabilities=["a:read"])


WAYS: dict[str, Way] = {
    "refused": Way(
        "plugin_error",
        "call",
        r"plugin_error in call \(-33403, execution_failed\): no way",
        bare("nexo_bare"),
        "bare_fail",
        ("--input", '{"message": "no way"}'),
    ),
    "refused by a tool": Way(
        "plugin_error",
        "call",
        r"plugin_error in call \(isError, tool_error\): it did not work",
        bare("mcp_bare"),
        "fail",
        ("--server", "modern"),
    ),
    "wrong arguments": Way(
        "invalid_call",
        "call",
        r"\(-33402, invalid_arguments\): .*/text.*; runner tools --json MANIFEST shows the input schema",
        bare("nexo_bare"),
        "bare_echo",
        ("--input", '{"text": 5}'),
    ),
    "no program": Way(
        "launch_failed",
        "plan",
        r"launch_failed in plan \(not_found\): ./run does not exist.*; (check|correct) the command",
        _without_program,
    ),
    "no interpreter": Way(
        "launch_failed",
        "plan",
        r"launch_failed in plan \(not_found\): .*/nonexistent does not exist; install it",
        lambda folder, write: (own(folder, write), write(folder / "run", "#!/nonexistent\n", 0o755))[0],
    ),
    "somebody else": Way(
        "handshake_failed",
        "handshake",
        r"handshake_failed in handshake \(\w+\): ",
        misbehaving("wrong_id", "rune", "hello"),
        "echo",
    ),
    "silent": Way(
        "timeout",
        "call",
        r"timeout in call \(deadline\): there was no answer within 500ms; .*--timeout",
        misbehaving("silent", "nexo", "call"),
        misbehaviour.TOOL["nexo"],
        ("--timeout", "500ms"),
    ),
    "silent, and a limit is shorter than its time": Way(
        "timeout",
        "call",
        r"timeout in call \(deadline\): there was no answer within 400ms; .* up to the policy's ceiling",
        misbehaving("silent", "nexo", "call"),
        misbehaviour.TOOL["nexo"],
        ("--limit", "call=400ms", "--timeout", "60"),
    ),
    "silent from the start, for its contract's time": Way(
        "timeout",
        "handshake",
        r"timeout in handshake \(deadline\): the plugin did not answer .* within 2s; .*contract's limit",
        misbehaving("silent", "rune", "start"),
        "echo",
        ("--timeout", "60"),
    ),
    "silent from the start": Way(
        "timeout",
        "handshake",
        r"timeout in handshake \(deadline\): the plugin did not answer .* within 300ms; .* policy's ceiling",
        misbehaving("silent", "mcp", "start"),
        "echo",
        ("--limit", "handshake=300ms"),
    ),
    "one clock for all": Way(
        "timeout",
        "invocation",
        r"timeout in invocation \(deadline\): the call was not over within 700ms; .*--timeout",
        misbehaving("silent", "rune", "call"),
        "echo",
        ("--timeout", "700ms"),
    ),
    # With nothing more to write to it: found by the pipe, and not by the clock.
    "closed its stdin": Way(
        "crashed",
        "call",
        r"crashed in call \(stdin_closed\): the plugin closed its stdin and went on running",
        lambda folder, write: own(folder, write, call="os.close(0); time.sleep(1000)"),
        options=("--timeout", "5m"),
    ),
    "died": Way(
        "crashed",
        "call",
        r"crashed in call \(exit:3\): .* status 3, before it answered; the plugin's stderr may say why",
        misbehaving("exit_failing", "nexo", "call"),
        misbehaviour.TOOL["nexo"],
        tail="cannot open the database",
    ),
    "died early": Way(
        "crashed",
        "handshake",
        r"crashed in handshake \(exit:3\): .*before it answered the handshake",
        misbehaving("exit_failing", "mcp", "start"),
        "echo",
        tail="cannot open the database",
    ),
    "died late": Way(
        "crashed",
        "teardown",
        r"crashed in teardown \(exit:3\): .*after it had answered",
        misbehaving("answer_and_fail", "rune", "call"),
        "echo",
    ),
    "talked too much": Way(
        "crashed",
        "call",
        r"crashed in call \(output\): the plugin wrote more than its output limit of 64 KiB; raise the",
        misbehaving("burst_stderr", "nexo", "call"),
        misbehaviour.TOOL["nexo"],
        ("--limit", "output=64K"),
        tail="eeeeeee",
    ),
    "no number": Way(
        "malformed_response",
        "call",
        r"malformed_response in call \(bad_number\): ",
        misbehaving("nan", "mcp", "call"),
        "echo",
    ),
    "endless": Way(
        "malformed_response",
        "call",
        r"malformed_response in call \(frame_too_large\): ",
        misbehaving("endless_line", "nexo", "call"),
        misbehaviour.TOOL["nexo"],
    ),
    "no such tool of nexo": Way(
        "tool_not_exposed",
        "call",
        r"tool_not_exposed in call \(tool\): .*'bare_ehco'; did you mean 'bare_echo'\?",
        bare("nexo_bare"),
        "bare_ehco",
    ),
    "no such tool of mcp": Way(
        "tool_not_exposed",
        "call",
        r"tool_not_exposed in call \(tool\): .*'ehco'.*; did you mean 'echo'\?",
        bare("mcp_bare"),
        "ehco",
        ("--server", "legacy"),
    ),
    "no such prompt": Way(
        "tool_not_exposed",
        "call",
        r"tool_not_exposed in call \(prompt\): .*'zzz'.*; there are 'greet'",
        bare("mcp_bare"),
        "zzz",
        ("--server", "modern", "--kind", "prompt"),
    ),
    "no such tool of rune": Way(
        "tool_not_exposed",
        "handshake",
        r"tool_not_exposed in handshake \(exposed_tools\): .*'ehco'.*'echo', 'fail'",
        bare("rune_echo"),
        "ehco",
    ),
    "no such resource": Way(
        "plugin_error",
        "call",
        r"plugin_error in call \(-32002, resource_not_found\): .*; did you mean 'bare://note'\?",
        bare("mcp_bare"),
        "bare://noet",
        ("--server", "legacy", "--kind", "resource"),
    ),
    "another version": Way(
        "protocol_version_mismatch",
        "handshake",
        r"protocol_version_mismatch in handshake",
        lambda folder, write: rune(folder, write, protocol_version="rterm.plugin.v2"),
        "echo",
    ),
    "undeclared": Way(
        "capability_not_declared",
        "handshake",
        r"capability_not_declared in handshake",
        lambda folder, write: rune(folder, write, ["a:read"]),
        "echo",
    ),
    "not allowed": Way(
        "capability_not_allowed",
        "handshake",
        r"capability_not_allowed in handshake",
        _declaring,
        "echo",
        ("--policy", "{folder}/policy.toml"),
    ),
    "manifest": Way(
        "manifest_invalid", "manifest", r"manifest_invalid: .*nexo-plugin.toml:\d+:\d+: ", _without_version
    ),
    "which server": Way(
        "manifest_invalid",
        "manifest",
        r"server_needed: there are 3 servers: 'modern', 'legacy', 'silent-legacy'\n.*--server NAME",
        bare("mcp_bare"),
        "echo",
    ),
    "another server": Way(
        "manifest_invalid",
        "manifest",
        r"server_unknown: there is no server 'modem'; there are 'modern'",
        bare("mcp_bare"),
        "echo",
        ("--server", "modem"),
    ),
    "nothing there": Way(
        "manifest_invalid",
        "manifest",
        r"file_missing: there is no such file",
        lambda folder, write: folder / "nowhere",
    ),
    "no such policy": Way(
        "policy_invalid",
        "policy",
        r"policy_invalid: nowhere: policy_unknown: no policy is called 'nowhere'",
        own,
        options=("--policy", "nowhere"),
    ),
    "policy": Way(
        "policy_denied",
        "policy",
        r"policy_denied: .*\n.*nexo-plugin.toml:\d+:\d+: read_ceiling: .*/srv",
        lambda folder, write: own(
            folder, write, more='[plugin.sandbox]\nenabled = true\nfs_read_paths = ["/srv"]\n'
        ),
    ),
    "machine": Way(
        "sandbox_unavailable",
        "plan",
        r"sandbox_unavailable in plan \(\w+\): .*; ",
        own,
        env=(("RUNNER_BWRAP", "/nonexistent"),),
    ),
}


def fail(
    caller: Caller, folder: Path, write_file: Write, names: Sequence[str], *more: str
) -> list[tuple[str, tuple[Done, Any]]]:
    """Name, what came of it, and its report."""
    lines, reports = [], []
    for name in names:
        way, place = WAYS[name], folder / name.replace(" ", "-")
        place.mkdir()
        place.chmod(0o755)
        plugin = way.make(place, write_file)
        reports.append(caller.home / f"{place.name}.json")
        options = [option.replace("{folder}", str(place)) for option in way.options]
        words = [*options, *more, "--report", str(reports[-1]), str(plugin), way.name]
        lines.append(Line(["call", *words], env=dict(way.env)))
    caller.give(folder)
    found = run_lines(caller, lines, at_once=4, timeout=120)
    return [
        (name, (done, json.loads(report.read_text())))
        for name, done, report in zip(names, found, reports, strict=True)
    ]


def failed_as_it_should(name: str, found: tuple[Done, Any]) -> None:
    way, (done, report) = WAYS[name], found
    assert (done.returncode, done.stdout) == (EXIT[way.code], ""), done.stderr
    assert re.match(f"runner: .*{way.said}", done.stderr, re.DOTALL), done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    if way.code not in ("manifest_invalid", "policy_invalid", "policy_denied"):
        # One line that says it all, and then the plugin's own words.
        assert max(map(len, lines)) < 1000
        assert lines[1:2] in ([], ["  its stderr ends with:"]) and all(
            line.startswith("  | ") for line in lines[2:]
        )
    assert way.tail in "".join(lines[2:])
    assert faults(report) == []
    assert (report["outcome"]["code"], report["outcome"]["phase"]) == (way.code, way.phase)
    assert report["exit"]["status"] == done.returncode


def test_every_way_to_fail(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    check_rows(fail(runner_as, plugin_dir, write_file, list(WAYS)), failed_as_it_should)


def test_every_code_that_can_be_had_is_among_them() -> None:
    """quarantined and overloaded are said by those who keep plugins; internal is for accidents."""
    assert {way.code for way in WAYS.values()} == set(EXIT) - {
        *("ok", "cancelled", "quarantined", "overloaded", "internal")
    }


def test_failures_for_programs(runner_as_user: Caller, plugin_dir: Path, write_file: Write) -> None:
    names = ["refused", "died", "silent", "manifest", "policy", "no such tool of mcp"]

    def check(name: str, found: tuple[Done, Any]) -> None:
        way, (done, report) = WAYS[name], found
        assert (done.returncode, done.stdout) == (EXIT[way.code], "")
        [line] = done.stderr.splitlines()
        said = json.loads(line)
        assert line.isascii()
        assert {key: said[key] for key in report["outcome"]} == report["outcome"]
        assert way.tail in said["stderr_tail"]
        assert bool(said["diagnostics"]) == (name == "manifest")
        assert [denial["asked"] for denial in said["denials"]] == (["/srv"] if name == "policy" else [])
        if name == "refused":
            assert (said["cause"], said["kind"], said["message"]) == ("-33403", "execution_failed", "no way")

    check_rows(fail(runner_as_user, plugin_dir, write_file, names, "--json"), check)


def test_a_result_for_programs_is_one_line(runner_as_user: Caller, copied: Copy) -> None:
    done = runner_as_user("call", "--json", copied("rune_echo"), "echo")
    assert (done.returncode, done.stdout, done.stderr) == (0, '{"input": {}, "context": {}}\n', "")


# --- reports -----------------------------------------------------------------------------------------------


def test_a_report_of_a_call(runner_as: Caller, copied: Copy) -> None:
    where = runner_as.home / "report.json"
    plugin = copied("nexo_bare")
    done = runner_as("call", "--report", where, plugin, "bare_print", "--input", '{"text": "not JSON"}')
    assert done.returncode == 0
    report = json.loads(where.read_text())
    assert faults(report) == []
    assert (report["outcome"]["code"], report["exit"]["status"]) == ("ok", 0)
    session = report["session"]
    assert session["identity"] == {"id": "bare", "version": "1.0.0", "protocol": "1.10"}
    assert session["calls"] == {"ok": 1, "refused": 0, "failed": 0}
    assert session["frames"] == 4 and session["stdout_bytes"] > 100  # hello, the line, the answer, goodbye
    assert list(report["timings"]) == [
        *("manifest", "policy", "plan", "launch", "handshake", "call", "run", "teardown")
    ]


def test_a_report_to_a_descriptor(runner_as: Caller, copied: Copy) -> None:
    read, write = os.pipe()
    with open(read, "rb") as reader:
        done = runner_as("call", "--report", str(write), copied("rune_echo"), "echo", pass_fds=(write,))
        os.close(write)
        report = json.loads(reader.read())
    assert done.returncode == 0 and faults(report) == [] and report["plugin"]["contract"] == "rune"


def test_the_section_is_documented_key_by_key(runner_as_user: Caller, copied: Copy) -> None:
    where = runner_as_user.home / "report.json"
    runner_as_user("call", "--report", where, copied("rune_echo"), "echo")
    page = (ROOT / "docs/report.md").read_text()
    section = page.split("\n## `session`\n")[1].split("\n## ")[0]
    documented = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(documented) == sorted(json.loads(where.read_text())["session"])


# --- events and notices ------------------------------------------------------------------------------------


def test_events_are_lines_of_json(runner_as: Caller, copied: Copy) -> None:
    plugin = copied("mcp_bare")
    words = ("--server", "legacy", plugin, "slow", "--input", '{"steps": 3}')
    done = runner_as("call", "--events", "2", *words)
    assert done.returncode == 0
    assert [json.loads(line) for line in done.stderr.splitlines()] == [
        {"event": "progress", "value": {"progress": n, "total": 3, "message": f"step {n}"}} for n in (1, 2, 3)
    ]
    assert json.loads(done.stdout)["content"] == [{"type": "text", "text": "done"}]
    assert runner_as("call", *words).stderr == ""  # piped, and nobody asked


def test_notices_are_text_for_people(runner_as_user: Caller, copied: Copy) -> None:
    words = ("--server", "legacy", copied("mcp_bare"), "log")
    done = runner_as_user("call", *words)
    assert done.stderr == 'runner: log: {"level":"warning","logger":"bare","data":{"said":"mind the gap"}}\n'
    value = {"level": "warning", "logger": "bare", "data": {"said": "mind the gap"}}
    done = runner_as_user("call", "--events", "2", *words)
    assert json.loads(done.stderr) == {"event": "log", "value": value}
    assert runner_as_user("call", "--json", *words).stderr == ""


def test_no_event_is_lost_unsaid(runner_as_user: Caller, plugin_dir: Path) -> None:
    """Two thousand at once, and the answer right behind them: told, or counted as dropped."""
    manifest = misbehaviour.plugin(plugin_dir, "burst_frames", "mcp")
    where = runner_as_user.home / "report.json"
    done = runner_as_user("call", "--events", "2", "--report", where, manifest, "echo")
    assert done.returncode == 0
    told = len(done.stderr.splitlines())
    dropped = json.loads(where.read_text())["session"]["dropped"]["notices"]
    assert told + dropped == misbehaviour.REQUESTS and told >= 256


def test_what_is_said_before_a_failed_handshake_is_told(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    plugin = own(plugin_dir, write_file, hello='print("Loading…", flush=True); sys.exit(4)')
    done = runner_as_user("call", plugin, "own_tool")
    assert done.stderr.splitlines()[0] == "runner: stdout: Loading…"
    assert "crashed in handshake (exit:4)" in done.stderr


# --- terminals ---------------------------------------------------------------------------------------------

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r"


class Shown(NamedTuple):
    status: int
    terminal: str
    piped: bytes


def on_a_terminal(caller: Caller, stream: Literal["stdout", "stderr"], *words: str | Path) -> Shown:
    """With one of its streams on a terminal of 60 columns and the other in a pipe."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    subprocess.run(["stty", "cols", "60", "rows", "20", "-onlcr"], stdin=theirs, check=True)
    streams: dict[str, Any] = {stream: theirs}
    process = caller.start("call", *words, stdin=subprocess.DEVNULL, **streams)
    os.close(theirs)
    other = process.stderr if stream == "stdout" else process.stdout
    assert other is not None
    shown, until = b"", time.monotonic() + _SECONDS
    try:
        while time.monotonic() < until:
            select.select([ours], [], [], 0.2)
            try:
                piece = os.read(ours, 65536)
            except BlockingIOError:
                continue
            except OSError:  # all who had it are gone
                break
            if not piece:
                break
            shown += piece
        piped = other.read()
        return Shown(process.wait(_SECONDS), shown.decode(), piped)
    finally:
        other.close()
        os.close(ours)
        process.kill()
        process.wait()


def test_a_terminal_is_shown_that_it_takes_a_while(runner_as: Caller, copied: Copy) -> None:
    words = ("--server", "legacy", copied("mcp_bare"), "slow", "--input", '{"steps": 2, "seconds": 3}')
    shown = on_a_terminal(runner_as, "stderr", *words)
    assert shown.status == 0 and json.loads(shown.piped)["content"][0]["text"] == "done"
    assert re.search(r"\r\x1b\[Ktool slow … \d+ s 50 % step 1", shown.terminal)
    assert shown.terminal.endswith("\r\x1b[K")  # and nothing stays


def test_a_terminal_is_told_nothing_of_what_is_quick(runner_as_user: Caller, copied: Copy) -> None:
    shown = on_a_terminal(runner_as_user, "stderr", copied("rune_echo"), "echo")
    assert (shown.status, shown.piped) == (0, b'{"input": {}, "context": {}}\n')
    assert re.fullmatch(r"(\r\x1b\[K[^\r]*)*", shown.terminal)  # a slow machine may have drawn its line


def test_a_result_on_a_terminal_is_for_people_and_steers_nothing(
    runner_as_user: Caller, copied: Copy
) -> None:
    words = (copied("rune_echo"), "echo", "--input", json.dumps({"text": f"{ESCAPES} ü"}))
    shown = on_a_terminal(runner_as_user, "stdout", *words)
    assert shown.status == 0 and shown.piped == b""
    assert json.loads(shown.terminal) == {"input": {"text": f"{ESCAPES} ü"}, "context": {}}
    assert shown.terminal.count("\n") > 3  # indented
    assert shown.terminal.replace("\n", "").isprintable() and "ü" in shown.terminal


def test_strangers_do_not_write_on_the_terminal(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    said = json.dumps(ESCAPES)
    call = (
        f"print({said}, flush=True); sys.stderr.write({said} + 'last words'); sys.stderr.flush(); os._exit(3)"
    )
    shown = on_a_terminal(runner_as_user, "stderr", own(plugin_dir, write_file, call=call), "own_tool")
    assert shown.status == EXIT["crashed"]
    assert "last words" in shown.terminal and "stdout: " in shown.terminal and "owned" in shown.terminal
    ours = shown.terminal.replace("\r\x1b[K", "")
    assert ours.replace("\n", "").isprintable()


# --- who goes away -----------------------------------------------------------------------------------------


def test_nobody_reads_the_result(runner_as: Caller, copied: Copy) -> None:
    where = runner_as.home / "report.json"
    process = runner_as.start(
        "call", "--report", where, copied("rune_echo"), "echo", stdin=subprocess.DEVNULL
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(_SECONDS) == EXIT["cancelled"]
    report = json.loads(where.read_text())
    assert faults(report) == [] and report["outcome"]["cause"] == "stdout"


def test_stdout_that_takes_nothing(runner_as: Caller, copied: Copy) -> None:
    with open("/dev/full", "wb") as full:
        process = runner_as.start("call", copied("rune_echo"), "echo", stdin=subprocess.DEVNULL, stdout=full)
    assert process.stderr is not None
    said = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(_SECONDS) == EXIT["internal"]
    assert said.startswith(
        "runner: internal in call (stdout): the plugin answered, but its result cannot be written to stdout"
    )
    assert len(said.splitlines()) == 1


def test_stderr_that_nobody_reads_costs_nothing(runner_as_user: Caller, copied: Copy) -> None:
    words = ("--server", "legacy", copied("mcp_bare"), "log")
    process = runner_as_user.start("call", *words, stdin=subprocess.DEVNULL)
    assert process.stdout is not None and process.stderr is not None
    process.stderr.close()
    assert json.loads(process.stdout.read())["content"]
    process.stdout.close()
    assert process.wait(_SECONDS) == 0


def test_a_signal_while_nobody_reads_the_result(runner_as_user: Caller, copied: Copy) -> None:
    """Half a result is none: interrupted, it says so; not interrupted, all of it comes, however late."""
    text = "x" * (1 << 20)
    manifest = copied("mcp_bare")
    words = ("call", "--server", "legacy", manifest, "echo", "--input", "-")
    for number in (None, signal.SIGTERM):
        process = runner_as_user.start(*words)
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        with process:
            process.stdin.write(json.dumps({"text": text}).encode())
            process.stdin.close()
            first = process.stdout.read(1)  # the rest fills the pipe
            if number is not None:
                process.send_signal(number)
                status = process.wait(_SECONDS)  # although nobody reads on
                assert (status, b"cancelled in call" in process.stderr.read()) == (EXIT["cancelled"], True)
            rest = process.stdout.read()
        if number is None:
            assert process.returncode == 0
            assert json.loads(first + rest)["structuredContent"] == {"text": text}


def test_who_a_plugin_says_it_is_stands_in_the_report(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    where = runner_as_user.home / "report.json"
    folder = rune(plugin_dir, write_file, plugin_id="somebody-else")
    done = runner_as_user("call", "--report", where, folder, "echo")
    assert done.returncode == EXIT["handshake_failed"]
    report = json.loads(where.read_text())
    assert faults(report) == []
    assert (report["plugin"]["id"], report["session"]["claimed_id"]) == ("r", "somebody-else")


def test_stderr_that_is_full_holds_up_no_clock(runner_as_user: Caller, plugin_dir: Path) -> None:
    """Its reader lives and does not read, while the plugin has notices without end."""
    manifest = misbehaviour.plugin(plugin_dir, "flood_garbage", "nexo")
    words = ["call", str(manifest), misbehaviour.TOOL["nexo"], "--timeout", "1s"]
    process = runner_as_user.start(*words)
    try:
        status = process.wait(timeout=60)  # nobody has read a byte yet
        assert process.stderr is not None
        said = process.stderr.read()
    finally:
        process.kill()
        process.communicate()
    assert status == EXIT["timeout"]
    assert b"stdout" in said  # so much of the notices was taken


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_call(runner_as: Caller, copied: Copy, number: signal.Signals) -> None:
    where = runner_as.home / "report.json"
    words = ("--server", "legacy", copied("mcp_bare"), "slow", "--input", '{"steps": 900, "seconds": 1}')
    process = runner_as.start("call", "--events", "2", "--report", where, *words, stdin=subprocess.DEVNULL)
    with process:
        assert process.stderr is not None and b'"progress":1' in process.stderr.readline()
        process.send_signal(number)
        out, err = process.communicate(timeout=_SECONDS)
    assert (process.returncode, out) == (EXIT["cancelled"], b"")
    assert f"cancelled in call (signal:{int(number)})" in err.decode().splitlines()[-1]
    report = json.loads(where.read_text())
    assert faults(report) == []
    assert (report["outcome"]["cause"], report["plugin"]["id"]) == (f"signal:{int(number)}", "legacy")
    assert report["session"]["identity"]["version"] == "1.0.0" and report["usage"] is not None
    assert report["session"]["forced"] is False  # it was asked to leave, and left


def test_a_signal_ends_a_handshake(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    plugin = own(plugin_dir, write_file, hello='print("here", flush=True); time.sleep(1000)')
    where = runner_as.home / "report.json"
    words = ("call", "--report", where, "--limit", "handshake=1m", plugin, "own_tool")
    process = runner_as.start(*words, stdin=subprocess.DEVNULL)
    with process:
        assert process.stderr is not None and process.stderr.readline() == b"runner: stdout: here\n"
        process.terminate()
        process.communicate(timeout=_SECONDS)
    assert process.returncode == EXIT["cancelled"]
    report = json.loads(where.read_text())
    assert faults(report) == []
    assert report["session"]["identity"] is None and report["plugin"]["id"] == "own"


def test_a_terminals_interrupt_reaches_all_of_us_and_ends_only_the_call(
    runner_as: Caller, copied: Copy
) -> None:
    """^C goes to every process in the terminal's foreground: all others have to leave it to the runner."""
    where = runner_as.home / "report.json"
    words = ("--server", "legacy", copied("mcp_bare"), "slow", "--input", '{"steps": 900, "seconds": 1}')
    process = runner_as.start(
        *("call", "--events", "2", "--report", where, *words),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    with process:
        assert process.stderr is not None and b'"progress":1' in process.stderr.readline()
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=_SECONDS)
    assert process.returncode == EXIT["cancelled"] and b"(signal:2)" in err
    assert faults(json.loads(where.read_text())) == []


def test_a_limit_without_a_cgroup_is_named(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    where = runner_as_user.home / "report.json"
    folder = own(plugin_dir, write_file, call="bytearray(600 << 20)")
    done = runner_as_user("call", "--limit", "memory=512M", "--report", where, folder, "own_tool")
    assert done.returncode == EXIT["crashed"]
    [limit] = [each for each in json.loads(where.read_text())["limits"] if each["name"] == "memory"]
    assert ("the memory limit is 512 MiB, counted without a cgroup" in done.stderr) == limit["degraded"]


def test_who_interrupts_twice_is_in_a_hurry(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    """The plugin does not leave when it is asked to. The second time it is killed, and all is said and done
    as after the first."""
    call = "print('here', flush=True); time.sleep(1000)"
    where = runner_as.home / "report.json"
    words = ("call", "--report", where, own(plugin_dir, write_file, call=call), "own_tool")
    with runner_as.start(*words, stdin=subprocess.DEVNULL) as process:
        assert process.stderr is not None and process.stderr.readline() == b"runner: stdout: here\n"
        process.send_signal(signal.SIGINT)
        said = b"runner: the plugin is asked to end; press Ctrl-C again to end it at once\n"
        assert process.stderr.readline() == said
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=_SECONDS)
    assert (process.returncode, out) == (EXIT["cancelled"], b"")
    assert err.decode() == "runner: cancelled in call (signal:2): ended by signal 2\n"
    assert faults(json.loads(where.read_text())) == []
