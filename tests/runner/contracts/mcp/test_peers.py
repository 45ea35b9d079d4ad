"""The MCP dialect against real servers on pipes: one without an SDK, and some on the official one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runner.protocol.dialect import (
    Answer,
    Call,
    CallRefused,
    HostCall,
    HostCallCancelled,
    Notice,
    Progress,
    Refusal,
    Send,
    Violation,
)
from tests.conftest import ROOT
from tests.runner.contracts.mcp.pump import Pump
from tests.tables import one_case

BARE = str(ROOT / "tests/plugins/mcp_bare/server.py")
SDK = str(ROOT / "tests/plugins/mcp_sdk/server.py")
MODERN, LEGACY = "2026-07-28", "2025-11-25"

pytestmark = pytest.mark.launches

# As an argument of the server, and what comes of it.
BARE_ERAS = [("modern", MODERN), ("legacy", LEGACY), ("silent-legacy", LEGACY)]


def host(call: HostCall) -> Answer:
    if call.method == "roots/list":
        return Answer({"roots": [{"uri": "file:///data", "name": "data"}]})
    text = {"type": "text", "text": "blue"}
    return Answer({"role": "assistant", "content": text, "model": "m"})


def refusing(call: HostCall) -> Answer:
    return Answer(error=(-1, "User rejected sampling request", None))


def bare(era: str, *, services: Sequence[str] = ("roots", "sampling"), **options: Any) -> Pump:
    # Patience is a third of the handshake: short where a test waits for its end.
    granted: dict[str, Any] = {"handshake": 0.3} if era == "silent-legacy" else {"patient": True}
    return Pump(["/usr/bin/python3", BARE, era], services, **{"host": host, **granted, **options})


def sdk(era: str, script: str = SDK, **options: Any) -> Pump:
    """The SDK's servers are in the era of the first message: they are legacy if the probe never arrives."""
    services = ("roots", "sampling", "elicitation")
    given = {"host": host, "loses_probe": era == LEGACY, "patient": True, **options}
    return Pump([sys.executable, script], services, **given)


# --- a server without an SDK ------------------------------------------------------------------------------


@one_case(("era", "protocol"), BARE_ERAS)
def test_all_there_is_of_a_bare_server(era: str, protocol: str) -> None:
    with bare(era) as server:
        identity = server.identity()
        assert (identity.id, identity.title, identity.version) == ("demo", "Bare", "1.0.0")
        assert (identity.protocol, identity.instructions) == (protocol, "Say echo.")
        assert set(identity.details) == {"tools", "prompts", "resources", "logging"}

        names = [tool["name"] for tool in server.value("tools", kind="list")]
        assert names == ["echo", "add", "add_wrong", "fail", "slow", "sample", "roots", "log", "change"]
        assert server.value("echo", {"ä": [1, None]})["structuredContent"] == {"ä": [1, None]}
        assert server.value("add", {"a": 1, "b": 2})["structuredContent"] == {"sum": 3}
        assert server.text("sample") == "blue"
        assert server.text("roots") == "file:///data"
        assert server.text("slow", {"steps": 3}) == "done"
        assert server.progress() == [1, 2, 3]
        assert server.text("log") == "logged"
        logged = {"level": "warning", "logger": "bare", "data": {"said": "mind the gap"}}
        assert server.of(Notice) == [Notice("log", logged)]

        assert server.value("prompts", kind="list")[0]["name"] == "greet"
        greeting = server.value("greet", {"who": "you"}, "prompt")["messages"][0]["content"]["text"]
        assert greeting == "Greet you."
        assert server.value("resources", kind="list")[0]["uri"] == "bare://note"
        assert server.value("resource_templates", kind="list")[0]["name"] == "numbered"
        assert server.value("bare://note", kind="resource")["contents"][0]["text"] == "a note"
        assert server.value("ping", kind="method") == {}
        assert set(server.dialect.counters.values()) == {0}


@one_case("era", ["modern", "legacy"])
def test_what_goes_wrong_with_a_bare_server(era: str) -> None:
    with bare(era) as server:
        server.identity()
        assert server.call("nothing") == Refusal(1, "-32602", "Unknown tool: nothing", "invalid_arguments")
        failed = server.call("fail")
        assert isinstance(failed, Refusal) and (failed.code, failed.message) == ("isError", "it did not work")
        gone = server.call("bare://gone", kind="resource")
        assert isinstance(gone, Refusal) and gone.data == {"uri": "bare://gone"}
        none = server.call("no/such", kind="method")
        assert isinstance(none, Refusal) and none.kind == "method_not_found"
        assert server.value("add_wrong", {})["structuredContent"] == {"sum": "many"}  # nothing is known of it

        server.value("tools", kind="list")
        wrong = server.call("add_wrong", {})
        assert isinstance(wrong, Violation)
        assert (wrong.code, wrong.cause) == ("malformed_response", "output_schema")
        with pytest.raises(CallRefused, match="nothing"):
            server.start("nothing")
        assert server.text("change") == "changed"
        assert Notice("changed", {"list": "tools"}) in server.of(Notice)
        assert isinstance(server.call("nothing"), Refusal)  # asked again, as the list may be another


@one_case("era", ["modern", "legacy"])
def test_a_cancelled_call_is_stopped_and_the_session_goes_on(era: str) -> None:
    with bare(era) as server:
        server.identity()
        token = server.start("slow", {"steps": 2, "seconds": 3600})
        server.until(Progress)
        server.act(server.dialect.cancel(token, "enough"))
        assert server.text("echo", {}) == "{}"
        assert server.progress() == [1]


def test_a_refused_question_is_the_servers_to_judge_in_the_legacy_era() -> None:
    with bare("legacy", host=refusing) as server:
        server.identity()
        refused = server.call("sample")
        assert isinstance(refused, Refusal)
        assert (refused.code, refused.message) == ("isError", "-1 User rejected sampling request")


def test_a_refused_question_is_the_end_of_a_modern_call() -> None:
    with bare("modern", host=refusing) as server:
        server.identity()
        refused = server.call("sample")
        assert isinstance(refused, Violation)
        assert (refused.code, refused.cause) == ("capability_not_allowed", "input:sampling/createMessage")
        assert server.text("echo", {}) == "{}"


def test_a_modern_server_is_told_what_there_is_with_each_request() -> None:
    with bare("modern", services=()) as server:
        server.identity()
        refused = server.call("sample")
        assert isinstance(refused, Refusal)
        assert (refused.code, refused.kind) == ("-32021", "missing_client_capability")


@one_case(("era", "protocol"), [("modern", MODERN), ("legacy", LEGACY)])
def test_a_server_that_is_slower_than_our_patience(era: str, protocol: str) -> None:
    """It finds both questions when it comes up, and is what it is nevertheless."""
    with Pump(["/usr/bin/python3", BARE, era, "late"], handshake=0.3) as server:
        assert server.identity().protocol == protocol
        assert b'"initialize"' in server.of(Send)[1].frame
        assert server.text("echo", {}) == "{}"


# --- servers on the official SDK --------------------------------------------------------------------------


@one_case("era", [MODERN, LEGACY])
def test_all_there_is_of_an_sdk_server(era: str) -> None:
    with sdk(era) as server:
        identity = server.identity()
        assert (identity.title, identity.version, identity.protocol) == ("sdk", "1.2.3", era)
        assert identity.instructions == "Ask it anything small."
        names = [tool["name"] for tool in server.value("tools", kind="list")]
        assert names[:3] == ["add", "echo", "fail"]
        assert server.value("add", {"a": 1, "b": 2})["structuredContent"] == {"total": 3, "parts": [1, 2]}
        failed = server.call("fail", {"reason": "rain"})
        assert isinstance(failed, Refusal) and (failed.code, failed.kind) == ("isError", "tool_error")
        assert "rain" in failed.message
        assert server.text("steps", {"count": 2}) == "2 steps"
        assert server.progress() == [1, 2]
        assert [notice.value["data"] for notice in server.of(Notice)] == [{"step": 1}, {"step": 2}]
        assert server.value("memo://today", kind="resource")["contents"][0]["text"] == "nothing"
        assert "Ada" in str(server.value("greet", {"name": "Ada"}, "prompt")["messages"])
        assert server.value("ping", kind="method") == {}
        token = server.start("wait", {"seconds": 3600})
        server.until(Progress, len(server.events))
        server.act(server.dialect.cancel(token, "enough"))
        assert server.text("echo", {"text": "still here"}) == "still here"


def test_an_sdk_server_of_the_legacy_era_asks_while_it_works() -> None:
    with sdk(LEGACY) as server:
        server.identity()
        assert server.text("roots") == "file:///data"
        assert "blue" in server.text("sample", {"text": "a colour?"})
    with sdk(LEGACY, host=refusing) as server:
        server.identity()
        assert server.text("roots") == "refused: User rejected sampling request"


ASKING = """
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import InputRequiredResult, ListRootsRequest

server = MCPServer("asking")


@server.tool()
async def places(ctx: Context) -> str | InputRequiredResult:
    if not ctx.input_responses:
        return InputRequiredResult(input_requests={"where": ListRootsRequest()}, request_state="first")
    return f"{ctx.request_state}: {ctx.input_responses['where'].roots[0].uri}"


server.run()
"""


def test_an_sdk_server_of_the_modern_era_asks_by_answering(tmp_path: Path) -> None:
    script = tmp_path / "asking.py"
    script.write_text(ASKING)
    with sdk(MODERN, str(script)) as server:
        assert server.identity().protocol == MODERN
        assert server.text("places") == "first: file:///data"
        assert [call.method for call in server.of(HostCall)] == ["roots/list"]


def test_an_sdk_server_takes_its_question_back_with_the_call() -> None:
    """Nobody answers the server here; its call is cancelled while it waits for us."""
    with sdk(LEGACY, host=lambda call: None) as server:
        server.identity()
        token = server.start("roots")
        question = server.until(HostCall)
        server.act(server.dialect.cancel(token, "enough"))
        assert server.until(HostCallCancelled) == HostCallCancelled(question.ticket)
        assert server.text("echo", {"text": "still here"}) == "still here"


def test_a_modern_sdk_server_refuses_what_is_not_of_its_era() -> None:
    """What the handshake counts on: after the probe it is modern, and initialize does not change that."""
    with sdk(MODERN) as server:
        server.identity()
        with pytest.raises(CallRefused):
            server.dialect.call(1, Call("method", "initialize"))
        server.write(
            b'{"jsonrpc":"2.0","id":"old","method":"initialize","params":{"protocolVersion":"2025-11-25"}}\n'
        )
        assert server.text("echo", {"text": "still here"}) == "still here"
        assert server.dialect.counters["unknown"] == 1
