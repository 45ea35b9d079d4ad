"""The example/ of every contract: a small plugin of the standard library that works, in the cage.

Contracts are found by looking, so a new one is tested without a change here.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from runner.contracts.registry import contract_names, example_folder, find_contract
from runner.manifest.load import load
from tests.conftest import Caller
from tests.runner.cli.test_new import forget_state, run_as_printed
from tests.tables import check_rows, without_limits_note

FEWER_LINES_THAN = 80  # of a program
NAMES = contract_names()

pytestmark = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def example(name: str, plugin_dir: Path) -> Path:
    """A copy that a plugin's uid can reach."""
    found = load(example_folder(name)).plugin
    assert found is not None
    folder = plugin_dir / found.id  # some contracts want the folder to have the plugin's name
    shutil.copytree(example_folder(name), folder, ignore=shutil.ignore_patterns("__pycache__"))
    folder.chmod(0o755)
    return folder


@pytest.fixture
def state(runner_as: Caller, plugin_dir: Path) -> list[str]:
    """Options for a launch whose state, if the example asks for one, is not in the machine's own place."""
    place = plugin_dir / "place"
    place.mkdir()
    place.chmod(0o755)
    runner_as.give(place)
    return ["--state-dir", str(place / "state")]


@pytest.fixture
def called(runner_as: Caller, example: Path, name: str, state: list[str]) -> Calling:
    return Calling(runner_as, name, example, find_contract(name).example.call, state)


@dataclasses.dataclass
class Calling:
    caller: Caller
    contract: str
    folder: Path
    tool: str
    options: list[str]

    def __call__(self, given: str, tool: str = "") -> subprocess.CompletedProcess[str]:
        words = ["call", *self.options, "--json", str(self.folder), tool or self.tool, "--input", given]
        return self.caller(*words)


def programs(name: str) -> list[Path]:
    files = [path for path in Path(example_folder(name)).rglob("*") if path.is_file()]
    return [path for path in files if path.read_bytes().startswith(b"#!")]


# --- the files ---------------------------------------------------------------------------------------------


def test_it_has_one_short_program(name: str) -> None:
    [program] = programs(name)
    assert len(program.read_text().splitlines()) < FEWER_LINES_THAN
    assert program.read_text().startswith("#!/usr/bin/env python3\n")
    assert program.stat().st_mode & 0o111 == 0o111


def test_it_needs_only_the_standard_library(name: str) -> None:
    [program] = programs(name)
    tree = ast.parse(program.read_text(), feature_version=(3, 11))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module.partition(".")[0] for module in imported} <= sys.stdlib_module_names


def test_it_says_what_may_be_changed_and_how_to_try_it(name: str) -> None:
    folder = Path(example_folder(name))
    [program] = programs(name)
    assert ast.get_docstring(ast.parse(program.read_text()))
    tried = find_contract(name).example
    assert f"runner call . {tried.call} --input '{tried.input}'" in (folder / "README.md").read_text()


# --- without a launch --------------------------------------------------------------------------------------


def check_finds_nothing(called: Calling) -> None:
    done = called.caller("check", "--format", "json", called.folder)
    found = json.loads(done.stdout)
    assert (done.returncode, found["errors"], found["warnings"]) == (0, 0, 0), done.stdout
    [plugin] = found["files"][0]["plugins"]
    assert plugin["contract"] == called.contract


def explain_grants_all_it_asks_for(called: Calling) -> None:
    done = called.caller("explain", "--format", "json", called.folder)
    assert done.returncode == 0, done.stdout
    document = json.loads(done.stdout)
    assert {row["verdict"] for row in document["asked"]} <= {"granted"}
    assert document["grant"]["denials"] == []


# --- in the cage -------------------------------------------------------------------------------------------


def tools_lists_what_it_offers(called: Calling) -> None:
    done = called.caller("tools", *called.options, "--json", called.folder)
    assert (done.returncode, done.stderr) == (0, "")
    tools = json.loads(done.stdout)["tools"]
    call = find_contract(called.contract).example.call
    assert any(tool["name"] == call or tool["name"].endswith(f".{call}") for tool in tools), tools
    assert all(tool["description"] for tool in tools)


def its_call_is_answered(called: Calling) -> None:
    done = called(find_contract(called.contract).example.input)
    # With --json a contract's own record of the call follows the answer.
    said = [line for line in done.stderr.splitlines() if not line.startswith('{"event":"invocation",')]
    assert (done.returncode, said) == (0, [])
    assert json.loads(done.stdout)
    assert "world" in done.stdout or "world" not in find_contract(called.contract).example.input


def a_wrong_input_and_a_wrong_tool_are_refused_and_end_nothing_else(called: Calling) -> None:
    wrong = called("{}")
    assert wrong.returncode in (1, 2) and "Traceback" not in wrong.stderr, wrong.stderr
    assert re.search("invalid_call|plugin_error", wrong.stderr + wrong.stdout)
    unknown = called("{}", "no_such_tool")
    assert unknown.returncode != 0 and "Traceback" not in unknown.stderr


def it_ends_by_itself_when_its_input_ends(called: Calling) -> None:
    done = called.caller("exec", *called.options, called.folder)
    assert (done.returncode, done.stdout, without_limits_note(done.stderr)) == (0, "", "")


def a_line_that_is_not_the_protocol_makes_no_traceback(called: Calling) -> None:
    done = called.caller("exec", *called.options, called.folder, input="hello\n")
    assert "Traceback" not in done.stderr
    for line in done.stdout.splitlines():
        json.loads(line)


@pytest.mark.launches
@pytest.mark.usefixtures("nothing_left")
def test_its_readme_is_true(runner_as: Caller, example: Path, name: str) -> None:
    [block] = re.findall(r"^```sh\n(.*?)^```$", (example / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    commands = block.splitlines()
    assert [command.split()[1] for command in commands[:4]] == ["check", "explain", "tools", "call"]
    ended = list(run_as_printed(runner_as, commands, example))
    forget_state(runner_as, example)
    assert [(done.returncode, without_limits_note(done.stderr)) for done in ended] == [(0, "")] * len(
        commands
    )


# What a host says in one conversation, for the contracts whose conversation can be written down in advance.
CONVERSATIONS = {
    "nexo": [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"nexo_version": "0.2.0"}},
        {"jsonrpc": "2.0", "method": "broker.event", "params": {"topic": "a", "event": {}}},
        {
            "jsonrpc": "2.0",
            "id": 2,
            "method": "tool.invoke",
            "params": {"plugin_id": "greeter", "tool_name": "greeter_count", "args": {"text": "one two"}},
        },
        {"jsonrpc": "2.0", "id": 3, "method": "no.such.method", "params": {}},
        {"jsonrpc": "2.0", "id": 4, "method": "shutdown", "params": {"reason": "over"}},
    ],
    "rune": [
        {"type": "handshake", "protocol_version": "rterm.plugin.v1"},
        {
            "type": "request",
            "request_id": "r1",
            "tool_name": "count",
            "input": {"text": "one two"},
            "context": {},
        },
    ],
    "mcp": [
        {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "initialize",
            "params": {
                "protocolVersion": "2025-06-18",
                "capabilities": {},
                "clientInfo": {"name": "t", "version": "1"},
            },
        },
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "ping"},
        {"jsonrpc": "2.0", "id": 3, "method": "tools/list"},
        {
            "jsonrpc": "2.0",
            "id": 4,
            "method": "tools/call",
            "params": {"name": "count", "arguments": {"text": "a b"}},
        },
        {"jsonrpc": "2.0", "id": 5, "method": "no/such/method"},
    ],
}
ANSWERS = {
    "nexo": ['"tools": [{"name": "greeter_greet"', '{"words": 2}', "-32601", '{"ok": true}'],
    "rune": ['"exposed_tools": ["greet", "count"]', '"status": "ok", "output": {"words": 2}'],
    "mcp": ['"protocolVersion": "2025-06-18"', '"result": {}', '"inputSchema"', '"2 words"', "-32601"],
}


def a_conversation_is_as_the_contract_says(called: Calling) -> None:
    if called.contract not in CONVERSATIONS:
        assert called.caller("exec", *called.options, "--inspect", called.folder).returncode == 0
        return
    said = "".join(json.dumps(message) + "\n" for message in CONVERSATIONS[called.contract])
    done = called.caller("exec", *called.options, "--inspect", called.folder, input=said)
    assert (done.returncode, without_limits_note(done.stderr)) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == len(ANSWERS[called.contract])
    assert all(wanted in line for wanted, line in zip(ANSWERS[called.contract], lines, strict=True)), lines


QUESTIONS: Sequence[Callable[[Calling], None]] = (
    check_finds_nothing,
    explain_grants_all_it_asks_for,
    tools_lists_what_it_offers,
    its_call_is_answered,
    a_wrong_input_and_a_wrong_tool_are_refused_and_end_nothing_else,
    it_ends_by_itself_when_its_input_ends,
    a_line_that_is_not_the_protocol_makes_no_traceback,
    a_conversation_is_as_the_contract_says,
)


@pytest.mark.launches
@pytest.mark.usefixtures("nothing_left")
def test_it_works(called: Calling) -> None:
    check_rows({ask.__name__: ask for ask in QUESTIONS}, lambda _, ask: ask(called))
