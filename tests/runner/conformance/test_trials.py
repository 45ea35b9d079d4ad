"""Trials of plugins: the starters keep every rule, and a mutant of a starter is told the rule it breaks."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
import trio

from runner.cli import main
from runner.cli.conformance import without_secrets
from runner.conformance.engine import TrialSubject, prepare_subject, try_plugin
from runner.conformance.report import ContractRule, Transcript, Verdict
from runner.contracts.registry import contract_names, example_folder, find_contract, plugin_rules
from runner.exceptions import PluginFailure
from runner.launch.stages import Invocation
from runner.manifest.load import load
from runner.protocol.dialect import Call
from runner.protocol.framing import LineFraming
from runner.protocol.secrets import Secrets
from tests.conftest import Caller
from tests.runner.conformance.mutants import HONEST, MUTANTS, Mutant, mutate

pytestmark = [pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]

SECONDS = 10.0  # for an answer
TOGETHER = 4  # mutants that are tried at once


class Trials:
    """The starter of one contract, and its mutants."""

    def __init__(self, name: str, place: Path) -> None:
        self.name, self._place = name, place
        self.contract = find_contract(name)
        book = plugin_rules(self.contract)
        assert book is not None
        self.book = book

    def folder(self, mutant: Mutant | None = None) -> Path:
        """A starter that a plugin's uid can reach."""
        found = load(example_folder(self.name)).plugin
        assert found is not None
        folder = self._place / (f"m{mutant.number}" if mutant else "honest") / found.id
        shutil.copytree(example_folder(self.name), folder, ignore=shutil.ignore_patterns("__pycache__"))
        folder.chmod(0o755)
        folder.parent.chmod(0o755)
        if mutant is not None:
            [program] = [path for path in folder.rglob("*") if path.is_file() and _is_program(path)]
            lines = isinstance(self.book.framing, LineFraming)
            program.write_text(mutate(program.read_text(), mutant, lines=lines))
            if mutant.manifest is not None:
                manifest = Path(found.manifest).name
                text = (folder / manifest).read_text()
                assert text.count(mutant.manifest[0]) == 1
                (folder / manifest).write_text(text.replace(*mutant.manifest))
        return folder

    def subject(self, folder: Path) -> TrialSubject:
        tried = self.contract.example
        invocation = Invocation(str(folder), self.name, state_dir=str(folder.parent / "state"))
        call = Call(next(iter(self.contract.calls)), tried.call, json.loads(tried.input))
        return prepare_subject(invocation, self.contract, call, None, Secrets())

    async def broken(self, mutant: Mutant | None) -> set[str]:
        """The rules that it breaks."""
        verdicts = await try_plugin(self.book, self.subject(self.folder(mutant)), SECONDS)
        return {
            f"{each.rule.id}: {each.reason}"
            for each in verdicts
            if each.result == "fail" or each.reason.endswith("is not known")
        }

    async def wrong(self, mutants: Sequence[Mutant]) -> dict[int, set[str]]:
        """What mutants were told, where that is not what they should be told."""
        found: dict[int, set[str]] = {}
        limit = trio.CapacityLimiter(TOGETHER)

        async def one(mutant: Mutant) -> None:
            async with limit:
                told = await self.broken(mutant)
            wanted = {f"{self.name}-{number:02}" for number in (mutant.number, *mutant.also) if number > 0}
            if {each.partition(":")[0] for each in told} != wanted:
                found[mutant.number] = told

        async with trio.open_nursery() as nursery:
            for mutant in mutants:
                nursery.start_soon(one, mutant)
        return found


def _is_program(path: Path) -> bool:
    return path.read_bytes().startswith(b"#!")


QUICK = {"rune": (9,), "mcp": (-2, 14)}  # mutants that the default tier tries
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.broad) for name in contract_names()]


@pytest.mark.parametrize("name", NAMES)
def test_a_starter_keeps_every_rule(name: str, runner_as: Caller, plugin_dir: Path) -> None:
    """By the command line, in all formats that it has."""
    tried = find_contract(name).example
    state = plugin_dir / "place"
    state.mkdir()
    runner_as.give(state)
    words = ["--state-dir", str(state / "state"), "--call", tried.call, "--input", tried.input]
    done = runner_as("conformance", "--format", "json", name, str(Trials(name, plugin_dir).folder()), *words)
    document = json.loads(done.stdout)
    assert [row for row in document["rules"] if row["result"] == "fail"] == []
    assert (done.returncode, done.stderr, document["ok"]) == (0, "", True)
    assert document["count"]["pass"] >= 20
    assert all(row["exchange"] for row in document["rules"] if row["seconds"])


@pytest.mark.parametrize("name", QUICK)
def test_a_mutant_is_told_its_rule(name: str, plugin_dir: Path, sessions: None) -> None:
    mutants = [each for each in (*HONEST.get(name, ()), *MUTANTS[name]) if each.number in QUICK[name]]
    assert trio.run(Trials(name, plugin_dir).wrong, mutants) == {}


@pytest.mark.broad
@pytest.mark.parametrize("name", contract_names())
def test_every_rule_has_a_mutant_that_is_told_exactly_that(
    name: str, plugin_dir: Path, sessions: None
) -> None:
    trials = Trials(name, plugin_dir)
    numbers = [int(each.rule.id.rpartition("-")[2]) for each in trials.book.rules]
    assert [each.number for each in MUTANTS[name]] == numbers
    assert trio.run(trials.wrong, [*HONEST.get(name, ()), *MUTANTS[name]]) == {}


# --- the command line ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing", "."], "there is no contract 'nothing'"),
        (["/etc"], "the contract of '/etc' is not clear; write runner conformance CONTRACT MANIFEST"),
        (["rune", ".", "--input", "{}"], "name it with --call"),
        (["rune", ".", "--call", "x", "--kind", "hook"], "--kind hook: the contract rune has tool"),
        (["rune", ".", "--timeout", "soon"], "--timeout soon: "),
        (["rune", "--"], "there is no command"),
        (["rune", ".", "--call", ""], "--call: its value is empty"),
        (["rune", ".", "--secrets", "/dev/null"], "--secrets /dev/null: this is not JSON"),
    ],
)
def test_wrong_usage(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", *words]) == 2
    assert told in capsys.readouterr().err


def test_no_secret_is_in_a_report() -> None:
    talk = Transcript()
    talk.sent(b'{"token": "open-sesame-open"}')
    found = Verdict(ContractRule("toy-01", "", ""), "fail", "it said open-sesame-open", talk.lines)
    [hidden] = without_secrets(Secrets({"token": "open-sesame-open"}), (found,))
    assert "sesame" in str(found) and "sesame" not in str(hidden)
    assert hidden.exchange[0].text == '{"token": "[secret]"}'


def test_secrets_and_configuration_are_sent_in_the_handshake(plugin_dir: Path, sessions: None) -> None:
    """As `runner call` does. No transcript has a secret, however short. Without one that the plugin needs
    nothing is launched."""
    trials = Trials("kaged", plugin_dir)
    folder = trials.folder()
    manifest, program = folder / "kaged-plugin.yaml", folder / "plugin.py"
    keys = {"type": "object", "properties": {"pin": {"type": "string"}}, "required": ["pin"]}
    manifest.write_text(f"{manifest.read_text()}\nsystem_config_schema: {json.dumps(keys)}\n")
    needed = 'assert (params["system_config"], params["config"]) == ({"pin": "1234"}, {"greeting": "Hi"})'
    head = '    if method == "initialize":\n'
    assert program.read_text().count(head) == 1
    program.write_text(program.read_text().replace(head, f"{head}        {needed}\n"))
    book = trials.book._replace(rules=trials.book.rules[:1])

    def try_with(config: object, secrets: Secrets | None) -> Verdict:
        invocation = Invocation(str(folder), "kaged", state_dir=str(folder.parent / "state"))
        subject = prepare_subject(invocation, trials.contract, None, config, secrets)
        [verdict] = trio.run(try_plugin, book, subject, SECONDS)
        return verdict

    verdict = try_with({"greeting": "Hi"}, Secrets({"pin": "1234"}))
    assert verdict.result == "pass", verdict
    assert '"system_config":"[secret]"' in verdict.exchange[0].text and "1234" not in str(verdict)
    with pytest.raises(PluginFailure, match=r"without --secrets, .* the key 'pin' is missing") as failed:
        try_with(None, None)
    assert "give --secrets" in failed.value.outcome.hint


def test_a_plugin_that_is_not_launched_is_not_judged(runner_as: Caller, plugin_dir: Path) -> None:
    done = runner_as("conformance", "rune", plugin_dir / "nowhere")
    assert (done.returncode, done.stdout) == (20, "") and "nowhere" in done.stderr
    (plugin_dir / "rterm-plugin.json").write_text("{}")  # its contract is known without being named
    done = runner_as("conformance", plugin_dir)
    assert (done.returncode, done.stdout) == (20, "") and "rterm-plugin.json" in done.stderr
    done = runner_as("conformance", "mcp", "--read", "/root", "--", "/usr/bin/cat")
    assert (done.returncode, done.stdout) == (21, "") and done.stderr.startswith("runner: policy_denied")
    assert "Traceback" not in done.stderr


# A plugin that asks its host before it exits, and starts only as often as its argument says.
ASKS_AT_THE_END = """
import json, sys
starts, most = sys.argv[1], int(sys.argv[2])
before = int(open(starts).read() or 0)
print(before + 1, file=open(starts, "w"))
def say(**fields):
    print(json.dumps({"jsonrpc": "2.0", **fields}), flush=True)
for line in sys.stdin if before < most else ():
    try:
        asked = json.loads(line)
        method, number = asked["method"], asked["id"]
    except (ValueError, KeyError, TypeError):
        continue
    if method == "initialize":
        say(id=number, result={"manifest": {"plugin": {"id": "late"}}})
    elif method == "shutdown":
        say(id=number, result={"ok": True})
        say(id="mine", method="memory.store", params={})
        sys.exit(json.loads(sys.stdin.readline())["id"] != "mine")
    else:
        say(id=number, error={"code": -32601, "message": "no such method"})
"""


def test_a_request_before_the_exit_and_a_handshake_that_fails_later(runner_as_user: Caller) -> None:
    broken = {}
    for most in (100, 2):
        starts = runner_as_user.home / f"starts-{most}"
        starts.touch()
        os.chown(starts, runner_as_user.uid, -1)
        command = ("/usr/bin/python3", "-c", ASKS_AT_THE_END, starts, str(most))
        done = runner_as_user("conformance", "--format", "json", "nexo", "--write", starts, "--", *command)
        rules = json.loads(done.stdout)["rules"]
        broken[most] = [each["id"] for each in rules if each["result"] == "fail"]
    # The first two starts are that of the rules that share one, and that of nexo-01.
    assert broken == {100: [], 2: ["nexo-20", "nexo-21", "nexo-22"]}


def test_a_server_may_ping_its_host() -> None:
    book = plugin_rules(find_contract("mcp"))
    assert book is not None
    assert book.reply({"method": "ping", "id": 7}) == {"jsonrpc": "2.0", "id": 7, "result": {}}
    assert book.reply({"method": "roots/list", "id": 7})["error"]["code"] == -32601


def test_a_flood_ends_a_trial_and_not_the_runner(runner_as: Caller) -> None:
    """A command that writes without end, and that no rule finds an answer in."""
    done = runner_as("conformance", "--format", "junit", "mcp", "--", "/usr/bin/yes")
    assert done.returncode == 1
    [suite] = ElementTree.fromstring(done.stdout)
    told = {case.attrib["name"][:6]: case[0].attrib.get("message", "") for case in suite}
    assert told["mcp-01"].startswith("it wrote more than")
    # Which of both comes first depends on how much the first read brings.
    assert told["mcp-27"].startswith(("it wrote more than", "something else than a message came on stdout"))
    assert told["mcp-06"].startswith("it comes after the handshake, which failed")
    assert len(done.stdout) < 100_000
