"""The runner for Python programs: a conversation, one call, and all that can be wrong with either."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

import runner
from runner.approvals.confirmations import ConfirmationRecord
from runner.approvals.tools import identity_of
from runner.library import (
    CallConfirmation,
    InvalidCall,
    NotOnTrio,
    OpenPlugin,
    Outcome,
    PluginError,
    PluginFailure,
    WouldBlock,
    open_plugin,
    run,
)
from runner.lifecycle.spec import Spec
from runner.protocol.dialect import Progress, Refusal
from runner.protocol.host_services import Completion, Services
from sandbox.staged.store import list_changesets, locked, remove_changeset, store_path
from tests import misbehaviour
from tests.conftest import ROOT, SPARE_UID, SYSTEM_PATH
from tests.runner.launch.monitored_plugins import is_sound
from tests.tables import one_case

ENVIRON = {"PATH": SYSTEM_PATH, "HOME": "/", "RUNNER_CACHE": "off"}
SECONDS = 60.0
PLUGINS = ("nexo_bare", "mcp_bare", "rune_echo")

Write = Callable[..., Path]


@pytest.fixture
def shelf(plugin_dir: Path, sessions: None) -> Path:
    """Copies of the plugins, where a dropped uid can read them."""
    for name in PLUGINS:
        shutil.copytree(ROOT / "tests/plugins" / name, plugin_dir / name)
    for path in plugin_dir.rglob("*"):
        path.chmod(0o755)
    return plugin_dir


def opened(path: Path, **more: Any) -> Any:
    more.setdefault("environ", ENVIRON)
    return open_plugin(path, **more)


# --- All three contracts -----------------------------------------------------------------------------------

# folder, options, tool, input, what of the answer is the input again, identity, names of tools among others
CONTRACTS: Sequence[tuple[str, dict[str, Any], str, Callable[[Any], Any], tuple[str, str], str]] = (
    ("nexo_bare", {}, "bare_echo", lambda a: a["params"]["args"], ("bare", "1.0.0"), "bare_seen"),
    ("mcp_bare", {"server": "modern"}, "echo", lambda a: a["structuredContent"], ("modern", "1.0.0"), "add"),
    ("mcp_bare", {"server": "legacy"}, "echo", lambda a: a["structuredContent"], ("legacy", "1.0.0"), "add"),
    ("rune_echo", {}, "echo", lambda a: a["input"], ("rune-echo", "1.0.0"), "fail"),
)
IDS = ["nexo", "mcp-modern", "mcp-legacy", "rune"]
each_contract = one_case(("folder", "options", "tool", "given", "who", "other"), CONTRACTS, ids=IDS)
INPUT = {"text": "hello"}


@pytest.mark.launches
@pytest.mark.trio
@each_contract
async def test_a_conversation(
    shelf: Path, folder: str, options: Any, tool: str, given: Any, who: tuple[str, str], other: str
) -> None:
    with trio.fail_after(SECONDS):
        async with opened(shelf / folder, **options) as plugin:
            names = {entry["name"] for entry in await plugin.list()}
            assert {tool, other} <= names
            for _ in range(2):
                assert given(await plugin.call(tool, INPUT)) == INPUT
            assert (plugin.identity.id, plugin.identity.version) == who
            assert (plugin.report is None) == (folder != "rune_echo")  # there each call is a conversation
    is_sound(plugin.report)
    assert plugin.report["outcome"]["code"] == "ok"
    assert plugin.report["session"]["identity"]["id"] == who[0]


@pytest.mark.launches
@pytest.mark.trio
@each_contract
async def test_one_call(
    shelf: Path, folder: str, options: Any, tool: str, given: Any, who: tuple[str, str], other: str
) -> None:
    with trio.fail_after(SECONDS):
        result = await run(shelf / folder, tool, INPUT, environ=ENVIRON, **options)
    assert given(result.value) == INPUT
    assert (result.identity.id, result.identity.version) == who
    assert result.stderr == ""
    is_sound(result.report)
    assert result.report["session"]["calls"]["ok"] == 1


@pytest.mark.launches
@pytest.mark.trio
@one_case(
    ("folder", "options", "tool", "given", "code"),
    [
        ("nexo_bare", {}, "bare_fail", {"code": -33402, "message": "as told", "data": {"n": 1}}, "-33402"),
        ("mcp_bare", {"server": "modern"}, "fail", {}, "isError"),
        ("rune_echo", {}, "fail", {"code": "not_found", "message": "as told"}, "not_found"),
    ],
)
async def test_a_no(shelf: Path, folder: str, options: Any, tool: str, given: Any, code: str) -> None:
    """It lives, and may be asked again. Who does not catch it finds the report in it."""
    with trio.fail_after(SECONDS):
        async with opened(shelf / folder, **options) as plugin:
            for _ in range(2):
                with pytest.raises(PluginError) as caught:
                    await plugin.call(tool, given)
                assert caught.value.code == code and caught.value.message
        with pytest.raises(PluginError) as caught:
            await run(shelf / folder, tool, given, environ=ENVIRON, **options)
    assert caught.value.report is not None
    is_sound(caught.value.report)
    assert caught.value.report["outcome"]["code"] == "plugin_error"


@pytest.mark.launches
@pytest.mark.trio
async def test_the_report_is_that_of_the_last_call_whatever_came_of_it(
    plugin_dir: Path, sessions: None
) -> None:
    """Where each call is a conversation of its own."""
    manifest = misbehaviour.plugin(plugin_dir, "exit_failing", "rune", "call")
    with trio.fail_after(SECONDS):
        async with opened(manifest) as plugin:
            await plugin.list()
            assert plugin.report["outcome"]["code"] == "ok"
            with pytest.raises(PluginFailure):
                await plugin.call(misbehaviour.TOOL["rune"])
            is_sound(plugin.report)
            assert plugin.report["outcome"]["code"] == "crashed"
            assert plugin.stderr == "cannot open the database\n"


# --- What can be wrong -------------------------------------------------------------------------------------


@pytest.mark.trio
@one_case(
    ("limits", "message"),
    [
        ({"memroy": "1M"}, "there is no limit 'memroy'"),
        ({"memory": "much"}, "memory: "),
        ({"call": "-1s"}, "call: "),
        ({"pids": "3.5"}, "pids: "),
    ],
)
async def test_wrong_limits(shelf: Path, limits: Mapping[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        async with opened(shelf / "nexo_bare", limits=limits):
            raise AssertionError("it was opened")


@pytest.mark.trio
@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        ("nowhere", "manifest_invalid"),
        ("no toml", "manifest_invalid"),
        ("wrong type", "manifest_invalid"),
        ("asks too much", "policy_denied"),
        ("no program", "launch_failed"),
        ("no policy", "policy_invalid"),
        ("no such server", "manifest_invalid"),
    ],
)
async def test_plugins_that_cannot_be_opened_say_why(shelf: Path, spoil: str, code: str) -> None:
    folder = shelf / "nexo_bare"
    manifest = folder / "nexo-plugin.toml"
    more: dict[str, Any] = {}
    match spoil:
        case "nowhere":
            folder = shelf / "nowhere"
        case "no toml":
            manifest.write_text("[plugin\n")
        case "wrong type":
            manifest.write_text(manifest.read_text().replace('id = "bare"', "id = 1", 1))
        case "asks too much":
            manifest.write_text(manifest.read_text() + 'fs_read_paths = ["/srv"]\n')
        case "no program":
            (folder / "plugin.py").unlink()
        case "no policy":
            more["policy"] = "/nowhere/policy.toml"
        case "no such server":
            folder, more["server"] = shelf / "mcp_bare", "nobody"
    with trio.fail_after(SECONDS):
        with pytest.raises(PluginFailure) as caught:
            async with opened(folder, **more):
                raise AssertionError("it was opened")
    failure = caught.value
    assert failure.outcome.code == code and str(failure).startswith(f"{code}: ")
    assert failure.explanation
    # Also for who sees nothing but a traceback.
    assert all(fault.message in str(failure) for fault in failure.outcome.diagnostics)
    assert all(denial.reason in str(failure) for denial in failure.outcome.denials)
    is_sound(failure.report)


@pytest.mark.launches
@pytest.mark.trio
async def test_limits_hold_for_each_contract(shelf: Path) -> None:
    with trio.fail_after(SECONDS):
        async with opened(shelf / "nexo_bare", limits={"call": "2s"}) as plugin:
            with pytest.raises(PluginFailure) as caught:
                await plugin.call("bare_slow", {"seconds": 5}, seconds=1000)
            assert caught.value.outcome[:2] == ("timeout", "call")
            assert (await plugin.call("bare_echo", INPUT))["params"]["args"] == INPUT
    assert plugin.report["limits_hit"] == ["call"]


@pytest.mark.launches
@pytest.mark.trio
async def test_a_closed_plugin_is_closed(shelf: Path) -> None:
    with trio.fail_after(SECONDS):
        async with opened(shelf / "nexo_bare") as plugin:
            pass
        for act in (plugin.call("bare_echo", INPUT), plugin.notify("broker.event", {"topic": "news.x"})):
            with pytest.raises(PluginFailure) as caught:
                await act
            assert (caught.value.outcome.code, caught.value.outcome.cause) == ("cancelled", "closed")


# --- What it tells, and what it is told --------------------------------------------------------------------


@pytest.mark.trio
async def test_a_kind_that_a_contract_has_not_got_starts_nothing(shelf: Path) -> None:
    server = shelf / "mcp_bare/server.py"
    server.write_text("#!/usr/bin/python3\nopen('/nonexistent')\n")  # which would be told, had it run
    with pytest.raises(InvalidCall, match="the contract mcp has no kind 'hook'; it has tool, prompt"):
        await run(shelf / "mcp_bare", "x", kind="hook", server="modern", environ=ENVIRON)


@pytest.mark.launches
@pytest.mark.trio
async def test_a_failure_stays_its_own_plugins(shelf: Path) -> None:
    """Also if it passes through the context of another one."""
    with trio.fail_after(SECONDS), pytest.raises(PluginError) as caught:
        async with opened(shelf / "mcp_bare", server="modern"), opened(shelf / "nexo_bare") as inner:
            await inner.call("bare_fail", {"code": -33402, "message": "as told"})
    assert caught.value.report is not None and caught.value.report["plugin"]["contract"] == "nexo"


@pytest.mark.launches
@pytest.mark.trio
async def test_events_until_the_end(shelf: Path) -> None:
    """What it says unasked comes; the iteration ends with the plugin."""
    heard: list[Any] = []

    async def listen(plugin: OpenPlugin) -> None:
        async for event in plugin.events():
            heard.append(event)

    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery, opened(shelf / "nexo_bare") as plugin:
            nursery.start_soon(listen, plugin)
            await plugin.call("bare_print", {"text": "not the protocol"})
            await plugin.call("bare_publish", {"topic": "shout.x", "event": {"payload": {"n": 1}}})
            await plugin.call("bare_publish", {"topic": "whisper.x", "event": {"payload": {}}})
    kinds = [event.kind for event in heard]
    assert kinds[:2] == ["stdout", "published"] and "dropped" in kinds[2:]
    assert heard[0].value == "not the protocol"
    assert (heard[1].value["source"], heard[1].value["payload"]) == ("bare", {"n": 1})


@pytest.mark.launches
@pytest.mark.trio
async def test_progress(shelf: Path) -> None:
    steps: list[Any] = []
    told: list[Any] = []
    with trio.fail_after(SECONDS):
        async with opened(shelf / "mcp_bare", server="modern") as plugin:
            answer = await plugin.call("slow", {"steps": 3}, on_progress=steps.append)
            async for event in plugin.events():
                told.append(event)
                if len(told) == 3:
                    break
    assert answer["content"][0]["text"] == "done"
    assert [step["progress"] for step in steps] == [1, 2, 3]
    assert all(isinstance(event, Progress) for event in told)


@pytest.mark.launches
@pytest.mark.trio
@each_contract
async def test_a_wrong_time_limit(
    shelf: Path, folder: str, options: Any, tool: str, given: Any, who: tuple[str, str], other: str
) -> None:
    """Nothing is sent, and nothing is owed: the next call works."""
    with trio.fail_after(SECONDS):
        async with opened(shelf / folder, **options) as plugin:
            for seconds in (-1, -0.5, math.nan, "5", True):
                with pytest.raises(ValueError, match=r"^seconds: "):
                    await plugin.call(tool, INPUT, seconds=seconds)
            assert given(await plugin.call(tool, INPUT, seconds=60)) == INPUT
    assert sum(plugin.report["session"]["calls"].values()) == 1


@pytest.mark.trio
@one_case("env", [{"A B": "x"}, {"A=B": "x"}, {"": "x"}, {"A": "x\0"}, {"A": 5}, {5: "A"}])
async def test_wrong_variables(shelf: Path, env: Any) -> None:
    with pytest.raises(ValueError, match=r"^env: "):
        async with opened(shelf / "nexo_bare", env=env):
            raise AssertionError("it was opened")


@pytest.mark.launches
@pytest.mark.trio
async def test_told(shelf: Path) -> None:
    with trio.fail_after(SECONDS):
        async with opened(shelf / "nexo_bare") as plugin:
            await plugin.notify("broker.event", {"topic": "news.today", "payload": {"n": 1}})
            seen = await plugin.call("bare_seen")
            while not seen["events"]:  # it may have been asked first: events go last
                seen = await plugin.call("bare_seen")
            with pytest.raises(PluginError, match="not subscribed"):
                await plugin.notify("broker.event", {"topic": "weather.today"})
            with pytest.raises(PluginError, match="no notification"):
                await plugin.notify("made.up")
        assert "news.today" in json.dumps(seen["events"])
        async with opened(shelf / "mcp_bare", server="legacy") as plugin:
            await plugin.notify("notifications/roots/list_changed")
            assert await plugin.call("ping", kind="method") == {}
        async with opened(shelf / "rune_echo") as plugin:
            with pytest.raises(PluginError, match="each process gets one request"):
                await plugin.notify("made.up")


@pytest.mark.launches
@pytest.mark.trio
async def test_initialize_does_not_use_up_the_time_for_the_configuration(shelf: Path) -> None:
    environ = {**ENVIRON, "NEXO_PLUGIN_INIT_TIMEOUT_MS": "0"}
    with trio.fail_after(SECONDS):
        with pytest.raises(PluginFailure, match="initialize") as caught:
            async with opened(shelf / "nexo_bare", config={"greeting": "hi"}, environ=environ):
                raise AssertionError("it was opened")
    assert caught.value.outcome[:2] == ("timeout", "handshake") and caught.value.outcome.cause == "deadline"


@pytest.mark.launches
@pytest.mark.trio
async def test_configured(shelf: Path) -> None:
    with trio.fail_after(SECONDS):
        async with opened(shelf / "nexo_bare", config={"greeting": "hi"}) as plugin:
            assert (await plugin.call("bare_seen"))["config"] == {"greeting": "hi"}
        with pytest.raises(PluginFailure) as caught:
            async with opened(shelf / "nexo_bare", config={"greeting": 1}):
                raise AssertionError("it was opened")
    assert (caught.value.outcome.code, caught.value.outcome.cause) == ("handshake_failed", "config_invalid")


# --- Services ----------------------------------------------------------------------------------------------


class Host:
    """All a host can offer, typed as a program would write it."""

    def __init__(self) -> None:
        self.published: list[Mapping[str, Any]] = []
        self.has_published = trio.Event()

    async def recall(self, agent_id: str, query: str, limit: int) -> Sequence[Mapping[str, Any]]:
        return [{"id": str(n), "agent_id": agent_id, "content": query} for n in range(limit)]

    async def complete(
        self, request: Mapping[str, Any], delta: Callable[[str], Awaitable[None]] | None
    ) -> Completion:
        words = request["messages"][-1]["content"].split()
        for word in words if delta is not None else ():
            assert delta is not None
            await delta(word)
        return Completion("" if delta is not None else " ".join(words), "stop", 3, len(words))

    async def publish(self, event: Mapping[str, Any]) -> None:
        self.published.append(event)
        self.has_published.set()

    async def roots(self) -> Sequence[Mapping[str, Any]]:
        return [{"uri": "file:///a", "name": "a"}]

    async def sample(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"role": "assistant", "content": {"type": "text", "text": "blue"}, "model": "m"}


@pytest.mark.launches
@pytest.mark.trio
async def test_services_of_nexo(shelf: Path) -> None:
    host = Host()
    services = Services(memory=host, llm=host, broker=host)
    asked = {"provider": "p", "model": "m", "messages": [{"role": "user", "content": "one two three"}]}
    with trio.fail_after(SECONDS):
        async with opened(shelf / "nexo_bare", services=services) as plugin:
            recalled = await plugin.call("bare_recall", {"agent_id": "a", "query": "x", "limit": 2})
            whole = await plugin.call("bare_complete", asked)
            pieces = await plugin.call("bare_complete", {**asked, "stream": True})
            await plugin.call("bare_publish", {"topic": "shout.x", "event": {"payload": {"n": 1}}})
            await host.has_published.wait()
    assert [entry["content"] for entry in recalled["result"]["entries"]] == ["x", "x"]
    assert (whole["result"]["content"], whole["deltas"]) == ("one two three", [])
    assert pieces["deltas"] == ["one", "two", "three"] and pieces["result"]["finish_reason"] == "stop"
    (event,) = host.published
    assert (event["topic"], event["source"], event["payload"]) == ("shout.x", "bare", {"n": 1})
    served = plugin.report["session"]["host_calls"]["served"]
    assert served == {"memory.recall": 1, "llm.complete": 2, "broker.publish": 1}


@pytest.mark.launches
@pytest.mark.trio
@one_case("server", ["modern", "legacy"])
@one_case("tool", ["roots", "sample"])
async def test_services_of_mcp(shelf: Path, write_file: Write, server: str, tool: str) -> None:
    """Refused by the default policy, which gives strangers neither; allowed by one that says so."""
    host = Host()
    services = Services(roots=host, sampling=host)
    policy = write_file(
        shelf / "policy.toml",
        'version = 1\n[capabilities]\nhost = ["roots/list", "sampling/createMessage"]\n',
    )
    with trio.fail_after(SECONDS):
        async with opened(shelf / "mcp_bare", server=server, services=services, policy=policy) as plugin:
            answer = await plugin.call(tool)
        assert answer["content"][0]["text"] == {"roots": "file:///a", "sample": "blue"}[tool]
        async with opened(shelf / "mcp_bare", server=server, services=services) as plugin:
            with pytest.raises((PluginError, PluginFailure)):
                await plugin.call(tool)
    assert plugin.report["session"]["host_calls"]["served"] == {}


# --- The package -------------------------------------------------------------------------------------------


@pytest.mark.launches
@pytest.mark.trio
async def test_a_program_asks_its_person(shelf: Path, tmp_path: Path) -> None:
    environ = {**ENVIRON, "XDG_CONFIG_HOME": str(tmp_path / "config")}
    asked: list[CallConfirmation] = []
    answers: list[Any] = [True, False, "yes"]

    def confirm(question: CallConfirmation) -> bool:
        asked.append(question)
        return answers.pop(0)

    async with opened(shelf / "mcp_bare", server="legacy", environ=environ, confirm=confirm) as plugin:
        await plugin.call("echo", {"name": "you"})
        assert not asked
        record = ConfirmationRecord(environ)
        for pattern in ("ec*", "destructive"):
            record.set_patterns(identity_of(plugin.plugin), (pattern,))
            answers[:] = [True, False, "yes"]
            assert (await plugin.call("echo", {"name": "you"}))["structuredContent"] == {"name": "you"}
            for _ in range(2):
                with pytest.raises(PluginFailure, match="nobody allowed this call"):
                    await plugin.call("echo", {"name": "you"})
        assert asked[0] == CallConfirmation(plugin.plugin.id, "echo", ('name: "you"',), {"name": "you"})
        assert len(asked) == 6
        [kept] = (tmp_path / "config/runner/approvals/confirmations").glob("*.json")
        kept.write_text("{")
        with pytest.raises(PluginFailure, match="the record of confirmations"):
            await plugin.call("echo", {"name": "you"})
        assert len(asked) == 6


def test_the_import_is_light() -> None:
    """`runner exec` imports the package as well, and has no use for trio."""
    program = (
        "import sys, runner; print('trio' in sys.modules); runner.open_plugin; print('trio' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["False", "True"]


def test_the_public_names_are_there() -> None:
    assert all(getattr(runner, name) is not None for name in runner.library.__all__)
    everything: dict[str, object] = {}
    exec("from runner import *", everything)  # noqa: S102
    assert set(everything) - {"__builtins__"} == {*runner.library.__all__, "__version__"}
    with pytest.raises(AttributeError, match="made_up"):
        runner.made_up  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.broad  # it checks our whole package: scripts/check finds what is wrong with the program itself
def test_programs_are_checked_against_the_types(tmp_path: Path) -> None:
    """The package's own files are not the program's to answer for, as when it is installed. The examples of
    docs/library.md are such programs."""
    assert (ROOT / "runner/py.typed").exists()
    examples = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/library.md").read_text(), re.M | re.S)
    for number, example in enumerate(examples):
        (tmp_path / f"example_{number}.py").write_text(example)
    assert len(examples) >= 9
    (tmp_path / "program.py").write_text((ROOT / "tests/runner/library_program.py").read_text())
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\nfollow_imports = silent\n")
    argv = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", str(tmp_path / "c")]
    checked = subprocess.run(
        [*argv, *sorted(each.name for each in tmp_path.glob("*.py"))],
        cwd=tmp_path,
        env={"PATH": SYSTEM_PATH, "MYPYPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    "error",
    [
        PluginError(Refusal(7, "no", "said no", "kind", {"a": 1})),
        InvalidCall(Refusal(7, "no", "said no", "kind", None)),
        PluginFailure(Outcome("timeout", "call", "late", "deadline"), ("line",)),
        NotOnTrio(),
        WouldBlock("trio", "await runner.run(...)"),
    ],
)
def test_an_exception_can_be_handed_to_another_process(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)
    assert {key: value for key, value in vars(again).items() if key != "_refusal"} == {
        key: value for key, value in vars(error).items() if key != "_refusal"
    }


def test_the_names_are_listed() -> None:
    assert set(runner.library.__all__) <= set(dir(runner))


@pytest.mark.trio
@one_case("given", [["sesame"], "sesame", [("a", "sesame")]])
async def test_secrets_that_are_no_mapping_are_refused(shelf: Path, given: Any) -> None:
    with pytest.raises(ValueError, match=r"^secrets: it has to be a mapping") as caught:
        async with runner.open_plugin(shelf / "nexo_bare", secrets=given):
            raise AssertionError("it was opened")
    assert "sesame" not in str(caught.value)


@pytest.mark.trio
@one_case("given", [{"binding": {"a": 1}}, {"binding": b"{}"}, {1: "x"}, ["binding"], "binding"])
async def test_options_that_are_no_texts_are_refused(shelf: Path, given: Any) -> None:
    with pytest.raises(ValueError, match=r"^options: "):
        async with runner.open_plugin(shelf / "nexo_bare", options=given):
            raise AssertionError("it was opened")


@pytest.mark.trio
async def test_keys_of_ssh_are_held_against_the_policy(shelf: Path) -> None:
    access = ["SHA256:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU", "git.example.com"]
    assert Spec("x", shelf / "nexo_bare", ssh=access).invocation().overrides.ssh == (
        access[0],
        "git.example.com:22",
    )
    wrong: tuple[tuple[Any, str], ...] = (
        ("git.example.com", "has to be a list"),
        (["me@git.example.com"], "an account in front"),
    )
    for given, message in wrong:
        with pytest.raises(ValueError, match=f"^ssh: .*{message}"):
            async with runner.open_plugin(shelf / "nexo_bare", ssh=given):
                raise AssertionError("it was opened")
    with pytest.raises(PluginFailure) as caught:
        async with runner.open_plugin(shelf / "nexo_bare", ssh=access):
            raise AssertionError("it was opened")
    assert caught.value.outcome.cause.startswith("ssh"), caught.value.outcome


@pytest.mark.trio
@one_case("name", ["policy", "state_dir"])
async def test_an_empty_name_is_refused(shelf: Path, name: str) -> None:
    """It is a variable that is not set, and must not mean the default."""
    with pytest.raises(ValueError, match=f"^{name}: its value is empty"):
        async with runner.open_plugin(shelf / "nexo_bare", **{name: ""}):  # type: ignore[arg-type]
            raise AssertionError("it was opened")


# --- staged writes ------------------------------------------------------------------------------------------

_WRITER = """#!/usr/bin/python3 -I
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    answer = {"tools": [{"name": "write", "inputSchema": {"type": "object"}}]}
    if asked["method"] == "initialize":
        answer = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                  "serverInfo": {"name": "writer", "version": "1"}}
    elif asked["method"] == "tools/call":
        with open(sys.argv[1] + "/new", "w") as file:
            file.write("x")
        answer = {"content": []}
    said = {"result": answer}
    if asked["method"] not in ("initialize", "tools/list", "tools/call"):
        said = {"error": {"code": -32601, "message": "no"}}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **said}), flush=True)
"""


@pytest.mark.launches
@pytest.mark.trio
async def test_the_writes_of_each_session_wait(plugin_dir: Path, sessions: None, write_file: Write) -> None:
    folder = plugin_dir / "folder"
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, SPARE_UID, SPARE_UID)
    write_file(plugin_dir / "server.py", _WRITER).chmod(0o755)
    entry = {"command": "./server.py", "args": [str(folder)], "x-sandbox": {"write": [str(folder)]}}
    manifest = write_file(plugin_dir / "mcp.json", json.dumps({"mcpServers": {"writer": entry}}))
    policy = write_file(plugin_dir / "policy.toml", f'version = 1\n[write]\nceiling = ["{folder}"]\n')
    names = []
    with trio.fail_after(SECONDS):
        for _ in range(2):
            done = await run(manifest, "write", {}, policy=policy, staged=True, environ=ENVIRON)
            assert done.report["staged"]["folders"] == [str(folder)] and not os.listdir(folder)
            names.append(done.report["staged"]["id"])
            waits = [each["message"] for each in done.report["notes"] if each["rule"] == "staged"]
        assert len(set(names)) == 2 and len(waits) == 1  # the second run names what the first one left
        done = await run(manifest, "write", {}, policy=policy, environ=ENVIRON)
        assert done.report["staged"] is None and os.listdir(folder) == ["new"]
    for each in list_changesets(store_path(ENVIRON)):
        if each.id in names:
            with locked(each):
                remove_changeset(each)
