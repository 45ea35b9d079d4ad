"""What an MCP server may ask of its host, through the guard it really goes through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from runner.contracts.mcp import services as mcp
from runner.protocol.dialect import Answer, HostCall
from runner.protocol.host_services import HostError, Services
from runner.protocol.service_guard import CONCURRENT, ServiceGuard

ROOTS, SAMPLING, ELICITATION = "roots/list", "sampling/createMessage", "elicitation/create"
QUESTION = {"messages": [], "maxTokens": 5}
FORM = {"message": "which?", "requestedSchema": {"type": "object"}}


class Host:
    """Says what it was told to say."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.heard: list[Any] = []

    async def roots(self) -> Sequence[Mapping[str, Any]]:
        return self.answer

    async def sample(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        self.heard.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    elicit = sample


async def emit(value: Any) -> None:
    raise AssertionError("nothing comes in parts")


async def ask(
    method: str, params: Any = None, answer: Any = None, *, allowed: Sequence[str] = ("*",)
) -> Answer:
    host = Host(answer)
    guard = ServiceGuard(mcp, Services(roots=host, sampling=host, elicitation=host), allowed)
    return await guard.answer(HostCall(1, method, params), emit)


@pytest.mark.parametrize(
    ("method", "params", "answer", "expected"),
    [
        (ROOTS, None, [{"uri": "file:///x", "name": "x"}], {"roots": [{"uri": "file:///x", "name": "x"}]}),
        (ROOTS, {}, (), {"roots": []}),
        (SAMPLING, QUESTION, {"model": "m"}, {"model": "m"}),
        (ELICITATION, FORM, {"action": "accept", "content": {}}, {"action": "accept", "content": {}}),
        (ELICITATION, {**FORM, "mode": "form"}, {"action": "decline"}, {"action": "decline"}),
        (SAMPLING, {**QUESTION, "tools": None}, {"model": "m"}, {"model": "m"}),
    ],
)
@pytest.mark.trio
async def test_served(method: str, params: Any, answer: Any, expected: Any) -> None:
    assert await ask(method, params, answer) == Answer(expected)


@pytest.mark.parametrize(
    ("method", "params", "answer", "code"),
    [
        (SAMPLING, None, {}, -32602),
        (SAMPLING, [1], {}, -32602),
        (SAMPLING, {"messages": []}, {}, -32602),
        (SAMPLING, {"messages": [], "maxTokens": True}, {}, -32602),
        (SAMPLING, {"messages": {}, "maxTokens": 1}, {}, -32602),
        (SAMPLING, QUESTION, "blue", -32603),
        (SAMPLING, QUESTION, HostError(-1, "User rejected sampling request"), -1),
        (SAMPLING, QUESTION, ValueError("secret"), -32603),
        (ELICITATION, {}, {"action": "accept"}, -32602),
        (ELICITATION, FORM, {"action": "maybe"}, -32603),
        (ELICITATION, FORM, None, -32603),
        (ROOTS, None, [{"name": "x"}], -32603),
        (ROOTS, None, 5, -32603),
        ("tools/list", None, None, -32601),
    ],
)
@pytest.mark.trio
async def test_not_served(method: str, params: Any, answer: Any, code: int) -> None:
    found = await ask(method, params, answer)
    assert found.error is not None and found.error[0] == code
    assert "secret" not in found.error[1]


@pytest.mark.parametrize(
    ("method", "params"),
    [
        (SAMPLING, {**QUESTION, "tools": []}),
        (SAMPLING, {**QUESTION, "toolChoice": {"mode": "auto"}}),
        (ELICITATION, {**FORM, "mode": "url", "url": "https://evil.com/"}),
        (ELICITATION, {**FORM, "mode": 7}),
    ],
)
@pytest.mark.trio
async def test_what_was_not_declared_does_not_reach_the_service(method: str, params: Any) -> None:
    host = Host({"action": "accept"})
    guard = ServiceGuard(mcp, Services(sampling=host, elicitation=host), ("*",))
    answer = await guard.answer(HostCall(1, method, params), emit)
    assert answer.error is not None and answer.error[0] == -32602 and host.heard == []


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (
            ROOTS,
            Answer(
                error=(-32601, "Roots not supported", {"reason": "Client does not have roots capability"})
            ),
        ),
        (SAMPLING, Answer(error=(-1, "User rejected sampling request", None))),
        (ELICITATION, Answer({"action": "decline"})),
    ],
)
@pytest.mark.trio
async def test_denied_by_policy(method: str, expected: Answer) -> None:
    assert await ask(method, QUESTION, [], allowed=()) == expected


@pytest.mark.parametrize("method", mcp.METHODS)
@pytest.mark.trio
async def test_absent(method: str) -> None:
    answer = await ServiceGuard(mcp, Services(), ("*",)).answer(HostCall(1, method, None), emit)
    assert answer.error is not None and answer.error[0] == -32601


def test_busy_is_an_error_of_its_own() -> None:
    answer = mcp.refused(ROOTS, "busy")
    assert CONCURRENT > 0 and answer.error is not None and answer.error[0] == -32603
