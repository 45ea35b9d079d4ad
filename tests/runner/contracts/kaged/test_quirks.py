"""A plugin with the quirks of the published one, in the cage, as root and as a user. And its secrets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from runner.outcome import EXIT
from tests import elsewhere
from tests.conftest import ROOT, Caller
from tests.tables import one_case

pytestmark = pytest.mark.usefixtures("nothing_left")

SECRET = "correct-horse-battery-staple"


@pytest.fixture
def quirks(plugin_dir: Path) -> Path:
    return _quirks(plugin_dir)


def _quirks(plugin_dir: Path) -> Path:
    folder = plugin_dir / "quirks"
    shutil.copytree(ROOT / "tests/plugins/kaged_quirks", folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    return folder


# --- The conversation --------------------------------------------------------------------------------------


def converse(folder: str) -> dict[str, Any]:
    """A whole conversation, with everything that came of it."""
    import os

    import trio

    from runner.launch.remote.remote_cell import aclose_forkserver
    from runner.launch.stages import Invocation
    from runner.protocol.dialect import Call, Notice
    from runner.session.open import open_session

    seen: dict[str, Any] = {"notices": []}
    compaction = {"messages_being_compacted": "a", "messages_remaining": "b"}
    compaction |= {"strategy": "drop", "trigger": "token_limit"}

    async def main() -> None:
        with trio.fail_after(120):
            async with open_session(Invocation(folder), environ=dict(os.environ)) as session:
                seen["tools"] = [tool["name"] for tool in await session.call(Call("list", "tools"))]
                seen["store"] = await session.call(Call("tool", "store", {"text": "x"}))
                await session.call(Call("tool", "quirks.confuse"))
                seen["hooks"] = [
                    await session.call(Call("hook", "on_session_start")),
                    await session.call(Call("hook", "on_session_idle", {"transcript": "t"})),
                    await session.call(Call("hook", "pre_compact", {"anything": 1})),
                    await session.call(Call("hook", "post_compact", compaction)),
                ]
                # It is asked whether it is alive after 5 s. It tells, and answers with an error.
                async for event in session.events():
                    if isinstance(event, Notice):
                        seen["notices"].append(event.kind)
                    if {"unread", "notification"} <= set(seen["notices"]):
                        break  # in any order: a busy machine may take 5 s for the calls
                seen["again"] = await session.call(Call("tool", "store", {"text": "y"}))
        seen["report"] = session.report
        await aclose_forkserver()

    trio.run(main)
    return seen


def test_a_conversation(runner_as: Caller, quirks: Path) -> None:
    seen = elsewhere.run(runner_as, converse, str(quirks), timeout=180)
    assert seen["tools"] == ["quirks.store", "quirks.confuse", "quirks.spill"]
    got = seen["store"]["got"]
    assert got["text"] == "x"
    assert set(got["_context"]) == {"operator_id", "project_id", "agent_path", "session_id", "request_id"}
    again = seen["again"]["got"]["_context"]
    assert again["session_id"] == got["_context"]["session_id"]
    assert again["request_id"] != got["_context"]["request_id"]
    inject = {"retain": ["drop"], "inject": "token_limit"}
    assert seen["hooks"] == [{"inject": "remember me"}, None, None, inject]
    assert seen["notices"][0] == "version_differs"
    assert set(seen["notices"]) == {"version_differs", "unread", "notification"}
    report = seen["report"]
    assert report["outcome"]["code"] == "ok"
    session = report["session"]
    assert session["identity"] == {"id": "quirks", "version": "0.1.0", "protocol": "1"}
    assert session["counters"]["health_checks"] >= 1
    # It answered shutdown and ended when its stdin was closed: no signal was needed.
    assert (session["forced"], session["farewell_error"]) == (False, "")
    assert (report["exit"]["code"], session["stderr_tail"]) == (0, "stdin is closed\n")


def hang(folder: str) -> list[str]:
    import os

    import trio

    from runner.exceptions import PluginFailure
    from runner.launch.remote.remote_cell import aclose_forkserver
    from runner.launch.stages import Invocation
    from runner.session.open import open_session

    async def main() -> list[str]:
        try:
            with trio.fail_after(120):
                async with open_session(Invocation(folder), environ=dict(os.environ)) as session:
                    await session.ended()
        except PluginFailure as failure:
            outcome: dict[str, str] = (failure.report or {})["outcome"]
        await aclose_forkserver()
        return [outcome[key] for key in ("code", "phase", "cause", "message")]

    return trio.run(main)


def test_a_plugin_that_hangs_between_calls_is_ended(runner_as: Caller, quirks: Path) -> None:
    manifest = quirks / "kaged-plugin.yaml"
    text = manifest.read_text()
    assert '["./plugin.py"]' in text
    manifest.write_text(text.replace('["./plugin.py"]', '["./plugin.py", "hangs"]'))
    assert elsewhere.run(runner_as, hang, str(quirks), timeout=180) == [
        "timeout",
        "idle",
        "health",
        "there was no answer to health.check within 5s",
    ]


# --- With a host of its own --------------------------------------------------------------------------------

ASKED = (
    {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"as": "the daemon likes"}},
    {"jsonrpc": "2.0", "method": "initialized", "params": {}},
    {"jsonrpc": "2.0", "id": 2, "method": "quirks.store", "params": {"text": "x"}},
    {"jsonrpc": "2.0", "id": 3, "method": "health.check"},
    {"jsonrpc": "2.0", "id": 4, "method": "shutdown"},
)


def inspect(runner: Caller, plugin: Path) -> tuple[int, list[Any], dict[str, Any]]:
    report = runner.home / "report.json"
    said = "".join(json.dumps(message) + "\n" for message in ASKED)
    done = runner("exec", "--inspect", "--report", report, plugin, input=said)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return done.returncode, lines, json.loads(report.read_text())


def test_a_daemon_of_its_own(runner_as: Caller, quirks: Path) -> None:
    status, lines, report = inspect(runner_as, quirks)
    assert status == 0
    assert [line.get("id", line.get("method")) for line in lines] == [1, 2, "quirks.checked", 3, 4]
    assert report["inspection"]["violation"] is None
    assert report["inspection"]["handshake"] is not None


@one_case(
    ("old", "new", "code", "cause"),
    [
        ('"version": "0.1.0"', '"version": "7"', "ok", ""),
        ('"api_version": 1', '"api_version": 2', "protocol_version_mismatch", "api_version"),
        ('["kaged:storage:read"]', '["net:*"]', "capability_not_declared", "capability_violation"),
        ('"notifications": []', '"notifications": ["x"]', "handshake_failed", "notification_undeclared"),
        ("import signal\n", "import signal\nprint('hello', flush=True)\n", "malformed_response", "bad_json"),
    ],
)
def test_a_daemon_does_not_get_what_breaks_the_contract(
    runner_as: Caller, plugin_dir: Path, old: str, new: str, code: str, cause: str
) -> None:
    quirks = _quirks(plugin_dir)
    program = quirks / "plugin.py"
    text = program.read_text()
    assert text.count(old) == 1
    program.write_text(text.replace(old, new))
    _, lines, report = inspect(runner_as, quirks)
    outcome = report["outcome"]
    assert (outcome["code"], outcome["cause"]) == (code, cause)
    assert bool(lines) == (code == "ok")


# --- Hooks -------------------------------------------------------------------------------------------------


def test_a_hook_that_fails_contributes_nothing(runner_as: Caller, quirks: Path) -> None:
    """The plugin answers with an object where only null is allowed."""
    program = quirks / "plugin.py"
    text = program.read_text()
    assert '"kaged.hook.on_session_idle": lambda params: None' in text
    program.write_text(
        text.replace('on_session_idle": lambda params: None', 'on_session_idle": lambda params: {}')
    )
    report = runner_as.home / "report.json"
    words = ("--kind", "hook", "--input", '{"transcript": "t"}', "--report", str(report))
    done = runner_as("call", quirks, "on_session_idle", *words)
    assert (done.returncode, done.stdout) == (0, "null\n")
    assert "hook_failed: the hook 'on_session_idle' failed" in done.stderr
    assert "it contributes nothing, and the session goes on" in done.stderr
    outcome = json.loads(report.read_text())["outcome"]
    assert (outcome["code"], outcome["cause"]) == ("ok", "hook_failed")
    assert "policy" not in done.stderr + outcome["message"]
    assert "if a hook fails: it contributes nothing" in runner_as("explain", quirks).stdout


# --- Secrets -----------------------------------------------------------------------------------------------


def spill(runner: Caller, folder: Path, values: dict[str, Any], *words: str) -> tuple[str, str, str, int]:
    """What `runner call` prints and reports, and its status, for a plugin that repeats its secrets."""
    secrets, report = folder.parent / "secrets.json", runner.home / "report.json"
    secrets.write_text(json.dumps(values))
    secrets.chmod(0o644)
    options = ("--secrets", str(secrets), "--report", str(report))
    done = runner("call", folder, "spill", *options, *words, timeout=120)
    return done.stdout, done.stderr, report.read_text(), done.returncode


@one_case("how", [("--events=2",), ("--json",), ("--events=2", "--json"), ()])
def test_no_secret_leaves_in_an_error_or_a_notice(
    runner_as: Caller, quirks: Path, how: tuple[str, ...]
) -> None:
    out, err, report, status = spill(runner_as, quirks, {"token": SECRET}, *how)
    assert status == EXIT["plugin_error"]
    assert SECRET not in out + err + report
    assert "the token [secret] is not valid" in out + err
    assert "the token is [secret]" in report  # the end of its stderr
    if "--events=2" in how:
        assert '"quirks.checked"' in err and '"quirks.[secret]"' in err and "not [secret]" in err


@one_case("then", ["exit", "error"])
def test_no_secret_leaves_with_the_end_of_stderr(runner_as: Caller, plugin_dir: Path, then: str) -> None:
    quirks = _quirks(plugin_dir)
    words = ("--input", json.dumps({"then": then}))
    out, err, report, status = spill(runner_as, quirks, {"token": SECRET}, *words)
    assert status == EXIT["crashed" if then == "exit" else "plugin_error"]
    assert SECRET not in out + err + report
    if then == "exit":
        assert "the token is [secret]" in err


@one_case(
    ("values", "code", "said"),
    [
        ({"token": SECRET, "spill": "refuse it"}, "handshake_failed", "the token [secret] is not valid"),
        ({"token": [SECRET]}, "handshake_failed", "/token"),
        ({"tokn": SECRET}, "handshake_failed", "tokn"),
    ],
)
def test_no_secret_leaves_in_a_failed_handshake(
    runner_as: Caller, quirks: Path, values: dict[str, Any], code: str, said: str
) -> None:
    out, err, report, status = spill(runner_as, quirks, values, "--events=2")
    assert status == EXIT["handshake_failed"]
    assert json.loads(report)["outcome"]["code"] == code
    assert said in err
    assert SECRET not in out + err + report


def test_without_the_rule_it_would_leave(runner_as: Caller, quirks: Path) -> None:
    """The control: a text of seven characters is too short to be looked for."""
    _, err, report, _ = spill(runner_as, quirks, {"token": "1234567"}, "--events=2")
    assert all("1234567" in text for text in (err, report))


def raise_errors(folder: str, secret: str) -> list[str]:
    """Everything that a program sees of the errors of a plugin that repeats its secret."""
    import traceback

    import trio

    import runner
    from runner.launch.remote.remote_cell import aclose_forkserver

    async def main() -> list[str]:
        seen = []
        for then in ("error", "exit"):
            try:
                async with runner.open_plugin(folder, secrets={"token": secret}) as plugin:
                    await plugin.call("spill", {"then": then})
            except (runner.PluginError, runner.PluginFailure) as error:
                told = (str(error), repr(error), vars(error), error.stderr, error.report)
                seen.append(f"{told}{''.join(traceback.format_exception(error))}")
        await aclose_forkserver()
        return seen

    return trio.run(main)


def test_no_secret_leaves_in_an_exception(runner_as: Caller, quirks: Path) -> None:
    refused, crashed = elsewhere.run(runner_as, raise_errors, str(quirks), SECRET, timeout=120)
    assert "the token [secret] is not valid" in refused and "the token is [secret]" in crashed
    assert SECRET not in refused + crashed
