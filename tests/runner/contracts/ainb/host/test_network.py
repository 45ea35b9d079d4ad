"""host/network/fetch: which hosts, and what the plugin gets. The fetch itself is tested with the protocol."""

from __future__ import annotations

from typing import Any

import pytest

from runner.contracts.ainb.declared import Declared
from runner.contracts.ainb.host.network import BODY_MOST_BYTES, common_rules
from runner.contracts.ainb.payload import encode
from runner.plugin import Allowance
from runner.protocol.https import fetch as module
from runner.protocol.https.failure import FetchFailed
from runner.protocol.https.request import HttpsRequest
from runner.protocol.https.response import HttpsResponse
from tests.runner.contracts.ainb.host.desk import Desk

FETCH = "host/network/fetch"
GOOD = {"url": "https://api.example.com/x"}


@pytest.mark.parametrize(
    ("listed", "allowed", "rules"),
    [
        (("a.com",), ("*:*",), ["a.com:443"]),
        (("a.com", "b.com"), ("b.com:443",), ["b.com:443"]),
        (("a.com",), ("*.com:443",), ["a.com:443"]),
        (("a.com",), ("*.com:80",), []),
        (("a.com:8443",), ("*:*",), []),
        (("*.a.com",), ("*:*",), []),
        (("*",), ("*:*",), []),
        (("not a host", "a.com"), ("*:*",), ["a.com:443"]),
        ((), ("*:*",), []),
        (None, ("*:*",), ["*:443"]),
        (None, ("*.a.com:*", "b.com:443", "c.com:80"), ["*.a.com:443", "b.com:443"]),
        (None, ("10.0.0.0/8:443",), []),
        (("10.0.0.1",), ("10.0.0.0/8:443",), ["10.0.0.1:443"]),
        (None, (), []),
    ],
)
def test_hosts_are_those_that_manifest_and_policy_have_in_common(
    listed: tuple[str, ...] | None, allowed: tuple[str, ...], rules: list[str]
) -> None:
    assert [str(rule) for rule in common_rules(listed, allowed)] == rules


def desk_for(listed: tuple[str, ...] | None, *hosts: str) -> Desk:
    lists = {} if listed is None else {"network": listed}
    declared = Declared(granted=("network",), lists=lists)
    return Desk(declared=declared, allowance=Allowance(hosts=hosts))


@pytest.mark.trio
async def test_without_the_capability_or_any_allowed_host() -> None:
    desk = Desk(declared=Declared(), allowance=Allowance(hosts=("*:*",)))
    assert await desk.error(FETCH, GOOD) == (-32001, "capability denied: network", None)
    code, message, _ = await desk_for(None).error(FETCH, GOOD)
    assert code == -32005 and "see ceiling and hosts under [network]" in message


@pytest.mark.trio
@pytest.mark.parametrize(
    "url",
    [
        "https://other.example.com/",
        "http://api.example.com/",
        "https://api.example.com:8443/",
        "https://api.example.com.evil.com/",
        "https://127.0.0.1/",
        "file:///etc/passwd",
    ],
)
async def test_what_is_not_allowed_is_not_asked(url: str) -> None:
    desk = desk_for(("api.example.com",), "*.example.com:443")
    code, message, data = await desk.error(FETCH, {"url": url})
    assert (code, message, set(data)) == (-32001, "capability denied: network", {"reason"})


@pytest.mark.trio
@pytest.mark.parametrize(
    "params",
    [
        {**GOOD, "method": "TRACE"},
        {**GOOD, "headers": [["Host", "evil.com"]]},
        {**GOOD, "headers": [["X", "a\r\nY: b"]]},
        {**GOOD, "headers": {"X": "y"}},
        {**GOOD, "headers": [["X"]]},
        {**GOOD, "headers": [["X", "y"]] * 257},
        {**GOOD, "body": "no base64"},
    ],
)
async def test_bad_params(params: dict[str, Any]) -> None:
    assert (await desk_for(None, "*:*").error(FETCH, params))[0] == -32602


@pytest.mark.trio
async def test_the_request_and_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[HttpsRequest, list[str], int]] = []

    async def fetch(request: HttpsRequest, rules: Any, *, most_bytes: int) -> HttpsResponse:
        asked.append((request, [str(rule) for rule in rules], most_bytes))
        return HttpsResponse(404, (("X", "y"), ("X", "z")), b"\xffbody", request.url)

    monkeypatch.setattr(module, "fetch", fetch)
    desk = desk_for(("api.example.com",), "*:443")
    expected = {"status": 404, "headers": [["X", "y"], ["X", "z"]], "body": encode(b"\xffbody")}
    assert await desk.result(FETCH, {**GOOD, "method": "", "body": None}) == expected
    sent = {**GOOD, "method": "POST", "body": "aGk=", "headers": [["A", "b"]]}
    assert await desk.result(FETCH, sent) == expected
    rules = ["api.example.com:443"]
    assert asked == [
        (HttpsRequest(GOOD["url"], "GET", (), None), rules, BODY_MOST_BYTES),
        (HttpsRequest(GOOD["url"], "POST", (("A", "b"),), b"hi"), rules, BODY_MOST_BYTES),
    ]


@pytest.mark.trio
async def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(request: HttpsRequest, rules: Any, *, most_bytes: int) -> HttpsResponse:
        raise FetchFailed("timeout", "there was no answer")

    monkeypatch.setattr(module, "fetch", fetch)
    error = await desk_for(None, "*:*").error(FETCH, GOOD)
    assert error == (-32603, "fetch failed: there was no answer", {"kind": "timeout"})
