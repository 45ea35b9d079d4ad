"""runner tools: what a plugin exposes, for people and for programs."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.contracts.registry import all_kinds, find_contract
from runner.outcome import EXIT
from tests import misbehaviour
from tests.conftest import ROOT, Caller
from tests.runner.cli.test_call import own
from tests.runner.cli.test_usage import completed
from tests.runner.launch.test_report import faults
from tests.tables import one_case

pytestmark = pytest.mark.usefixtures("nothing_left")

Copy = Callable[[str], Path]


@pytest.fixture
def copied(plugin_dir: Path) -> Copy:
    def copy(name: str) -> Path:
        folder = plugin_dir / name
        shutil.copytree(ROOT / "tests/plugins" / name, folder, dirs_exist_ok=True)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
        return folder

    return copy


NEXO = """\
bare 1.0.0 (nexo)

tools:
  bare_outbound  Described in the manifest.
  bare_echo      Gives its arguments back.
  bare_fail      Fails with the code, message and data it is told.
  bare_slow      Answers after so many seconds.
  bare_publish   Sends its arguments as the params of broker.publish.
  bare_recall    Asks the host with memory.recall; gives back what comes.
  bare_complete  Asks the host with llm.complete; gives back what comes, and the deltas.
  bare_seen      What was delivered so far: events, configuration, channels.
  bare_print     Prints a line that is not the protocol.

channels:
  bare

llm providers:
  bare_llm

memory backends:
  bare_vectors

hooks:
  bare_hook
"""
RUNE = """\
rune-echo 1.0.0 (rune)

tools:
  echo  The input and the context, as they came.
  fail  Refuses, with the code and the message it is given.
"""
MCP = """\
{era} 1.0.0 (mcp)

tools:
  echo       its arguments, structured
  add        a + b
  add_wrong  promises a sum, says a word
  fail       fails as tools fail
  slow       steps, each with progress
  sample     asks the client's model
  roots      asks the client for its roots
  log        logs, then answers
  change     says that the tools have changed

prompts:
  greet

resources:
  bare://note

resource templates:
  bare://note/{{n}}
"""


def test_for_people(runner_as: Caller, copied: Copy) -> None:
    for name, listing in (("nexo_bare", NEXO), ("rune_echo", RUNE)):
        done = runner_as("tools", copied(name))
        assert (done.returncode, done.stdout, done.stderr) == (0, listing, "")


@one_case("era", ["modern", "legacy", "silent-legacy"])
def test_of_mcp(runner_as_user: Caller, copied: Copy, era: str) -> None:
    done = runner_as_user("tools", "--server", era, copied("mcp_bare"))
    assert (done.returncode, done.stdout, done.stderr) == (0, MCP.format(era=era), "")


def test_for_programs_with_schemas(runner_as: Caller, copied: Copy) -> None:
    done = runner_as("tools", "--json", copied("rune_echo"))
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1
    found = json.loads(done.stdout)
    bundle = json.loads((ROOT / "tests/plugins/rune_echo/rterm-plugin.json").read_text())
    assert found["plugin"] == {
        "id": "rune-echo",
        "version": "1.0.0",
        "protocol": "rterm.plugin.v1",
        "contract": "rune",
    }
    assert [tool["input_schema"] for tool in found["tools"]] == [
        tool["input_schema"] for tool in bundle["tools"]
    ]


def test_the_lists_of_an_mcp_server_are_lists(runner_as_user: Caller, copied: Copy) -> None:
    done = runner_as_user("tools", "--json", "--server", "modern", copied("mcp_bare"))
    found = json.loads(done.stdout)
    assert list(found) == ["plugin", "tools", "prompts", "resources", "resource_templates"]
    assert [tool["name"] for tool in found["tools"]][:2] == ["echo", "add"]
    assert found["tools"][1]["outputSchema"]["required"] == ["sum"]
    assert found["resources"][0]["uri"] == "bare://note"


def test_a_plugin_without_tools(
    runner_as_user: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    """Nexo's catalogue is what it advertises: here nothing, as its manifest says."""
    plugin = own(plugin_dir, write_file)
    for name, old, new in (("run", "tools=tools", "tools=[]"), ("nexo-plugin.toml", '["own_tool"]', "[]")):
        text = (plugin / name).read_text()
        assert old in text
        write_file(plugin / name, text.replace(old, new), 0o755)
    done = runner_as_user("tools", plugin)
    assert done.returncode == 0 and "no tools" in done.stdout


def test_strangers_do_not_write_on_the_terminal(
    runner_as_user: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    plugin = own(plugin_dir, write_file)
    script = (plugin / "run").read_text()
    assert 'description="Own."' in script
    write_file(plugin / "run", script.replace('"Own."', r'"\x1b]0;owned\x07\x9b \u202e"'), 0o755)
    done = runner_as_user("tools", plugin)
    assert r"own_tool  \x1b]0;owned\x07\x9b \u202e" in done.stdout
    assert done.stdout.replace("\n", "").isprintable()


def test_a_report_of_it(runner_as: Caller, copied: Copy) -> None:
    where = runner_as.home / "report.json"
    done = runner_as("tools", "--report", where, "--server", "legacy", copied("mcp_bare"))
    report = json.loads(where.read_text())
    assert done.returncode == 0 and faults(report) == []
    assert report["session"]["calls"] == {"ok": 4, "refused": 0, "failed": 0}


# Of a contract that prepares its calls, the manifest says everything, and nothing is started.
STARTED = [each for each in misbehaviour.CONTRACTS if find_contract(each).prepared_calls is None]


@one_case("contract", STARTED)
def test_a_plugin_that_dies(
    runner_as_user: Caller, plugin_dir: Path, contract: misbehaviour.Contract
) -> None:
    manifest = misbehaviour.plugin(plugin_dir, "exit_failing", contract, "hello")
    where = runner_as_user.home / "report.json"
    done = runner_as_user("tools", "--report", where, manifest)
    assert (done.returncode, done.stdout) == (EXIT["crashed"], "")
    assert "crashed in handshake (exit:3)" in done.stderr
    assert done.stderr.endswith("  | cannot open the database\n")
    assert faults(json.loads(where.read_text())) == []


@one_case(
    ("words", "status", "said"),
    [
        ((), 2, "required: MANIFEST"),
        (("{p}", "echo"), 2, "to call one, use runner call MANIFEST NAME"),
        (("--report", "/", "{p}"), 2, "--report /: is a directory"),
        (("/nonexistent",), 20, "there is no such file"),
        (("{p}",), 20, "there are 3 servers: 'modern', 'legacy', 'silent-legacy'"),
        (("--server", "old", "{p}"), 20, "there is no server 'old'"),
    ],
)
def test_wrong_words(
    runner_as_user: Caller, copied: Copy, words: tuple[str, ...], status: int, said: str
) -> None:
    plugin = str(copied("mcp_bare"))
    done = runner_as_user("tools", *(plugin if word == "{p}" else word for word in words))
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr and "Traceback" not in done.stderr


def test_nobody_reads_the_list(runner_as_user: Caller, copied: Copy) -> None:
    process = runner_as_user.start("tools", copied("rune_echo"), stdin=subprocess.DEVNULL)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == EXIT["cancelled"]


def test_help_and_completion_know_both_verbs(runner_as_user: Caller) -> None:
    overview = runner_as_user("--help").stdout
    assert "  call  " in overview and "  tools  " in overview
    helped = runner_as_user("call", "--help").stdout
    for option in ("--input", "--kind", "--timeout", "--context", "--config"):
        assert f"  {option} " in helped
    script = runner_as_user("completion", "bash").stdout
    shared = {"--json", "--events", "--report", "--server", "--policy", "--memory", "--limit"}
    assert shared <= completed(script, "runner", "tools", "--")
    assert shared | {"--input", "--kind"} <= completed(script, "runner", "call", "--")
    assert completed(script, "runner", "call", "--kind", "p") == {"prompt"}
    assert completed(script, "runner", "call", "--kind", "m") == {"memory", "method"}
    assert completed(script, "runner", "call", "--timeout", "") == set()
    assert {"default", "dev", "strict"} <= completed(script, "runner", "call", "--policy", "")
    fish = runner_as_user("completion", "fish").stdout
    start = "complete -c runner -n '__fish_seen_subcommand_from"
    assert f"{start} call' -l kind -x -a '{' '.join(all_kinds())}'" in fish
    assert f"{start} tools' -l json -d '" in fish
