"""Delegated credentials: the token of each call, by a daemon's control plane, in real cages.

The plugin repeats its token wherever it can. Nothing that the daemon keeps, says or answers has it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import trio

from runner.launch.remote import forkserver
from runner.ledger.sqlite_file import DatabaseUnusable
from runner.protocol.host_services import Delegation, DelegationRequest, HostError
from runner.serve.control.delegation import BindingApiGateway
from runner.serve.control.settings import OrgApiGateway
from tests.runner.serve.control.market import ControlHouse, Market
from tests.runner.serve.control.plane import put_devkit
from tests.runner.serve.house import house
from tests.tables import check_rows

URL = "https://gateway.example.com"
SCOPES = ["chains:read", "runs:write"]
# The token follows from the call, so that the test knows it. Everything that the command is told is noted.
COMMAND = """#!/usr/bin/python3 -I
import json, sys
asked = json.load(sys.stdin)
with open(__file__ + ".asked", "a") as log:
    log.write(json.dumps(asked) + "\\n")
token = "vai_dlg_" + asked["invocation_id"][::-1]
print(json.dumps({"token": token, "expires_in": asked["seconds"]}))
"""
POLICY = """version = 1
[network]
ceiling = "allowlist"
hosts = ["gateway.example.com:443"]
[write]
ceiling = ["${state_dir}"]
"""
TELL = """
import hashlib
def told(body):
    token = body["context"].get("gateway", {}).get("delegation_token", "")
    print("I have", token, file=sys.stderr, flush=True)
    return token
"""


def token_of(call: str) -> str:
    return "vai_dlg_" + call[::-1]


def put_package(market: Market) -> Path:
    """The package of the tests, whose program repeats its token: in answers, events, errors and on stderr."""
    program = put_devkit(market.folder / "devkit-0.1.0-one") / "bin/plugin"
    text = program.read_text().replace("served = 0\n", "served = 0\n" + TELL, 1)
    text = text.replace('"served": served,', '"sha": hashlib.sha256(told(body).encode()).hexdigest(),')
    for said in ('"as asked"', 'f"step {number}"'):
        assert said in text
        text = text.replace(said, "told(body)")
    program.write_text(text)
    return market.package()


def put_gateway(market: Market) -> Path:
    """The settings of both orgs. Only alpha has a gateway."""
    program = market.write("delegate", COMMAND)
    program.chmod(0o755)
    gateway = f'gateway_url = "{URL}"\ngateway_token_command = ["{program}"]\n'
    orgs = "".join(
        f'[orgs.{org}]\ntokens = ["@{org}.token"]\nsecrets = {{key = "@{org}.key"}}\n{more}'
        for org, more in (("alpha", gateway), ("beta", ""))
    )
    market.settings(orgs=orgs)
    return program


@pytest.mark.launches
@pytest.mark.trio
async def test_each_call_gets_a_token_of_its_own_and_nobody_keeps_it(
    plugin_dir: Path, nothing_left: None
) -> None:
    market, said = Market(plugin_dir), list[str]()
    root, program = put_package(market), put_gateway(market)
    policy = market.write("policy.toml", POLICY)
    try:
        control = str(plugin_dir / "control.toml")
        async with house(plugin_dir, said=said, control=control, policy=str(policy)) as door:
            ask = ControlHouse(door, market)
            with trio.fail_after(300):
                assert (await ask.import_(root)).status == 201
                names = {org: await _bind(ask, org) for org in ("alpha", "beta")}
                calls, heard = await _calls(ask, names["alpha"])
                _what_the_command_was_told(program, names["alpha"], calls)
                await _the_audit(ask, names["alpha"], calls)
                records = [await ask("GET", f"/v1/plugin-invocations/{call}", org="alpha") for call in calls]
                for each in records:
                    effective = each.document["permissions"]["effective"]
                    assert effective["egress"] == ["gateway.example.com:443"]
                    assert each.document["stderr_tail"].count("I have [secret]") > 0
                await _an_org_without_a_gateway(ask, names["beta"])
                refused = await _a_command_that_fails(ask, program, names["alpha"])
                shown = [*heard, *records, refused]
                for path in ("/calls", "/audit", "/metrics", "/health", "/plugins", "/v1/plugin-invocations"):
                    raw = await door.ask(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                    assert raw.startswith(b"HTTP/1.1 200"), (path, raw)
                    shown.append(raw)
        for call in calls:
            for text in (token_of(call), token_of(call)[8:]):
                assert not [each for each in (*shown, *said) if text in str(each)]
                assert not _files_with(plugin_dir, text)
            # The control: what is kept is searched.
            assert {path.name for path in _files_with(plugin_dir, call)} >= {"ledger.db", "control.db"}
    finally:
        forkserver.close()


def _files_with(folder: Path, text: str) -> list[Path]:
    """The files that have it: databases, settings, packages, what was written beside them."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in found if text.encode() in path.read_bytes()]


async def _bind(ask: ControlHouse, org: str) -> str:
    slots = {"api_key": f"secret://{org}/key"}
    made = await ask.bind(org, scope={"org_id": org}, export_id="triage", secrets=slots)
    assert made.status == 201, made.document
    name: str = made.document["binding_id"]
    return name


async def _calls(ask: ControlHouse, name: str) -> tuple[list[str], list[Any]]:
    """The ids of three calls, and all that was answered: a success with a key, a failure, and a stream with
    progress."""
    path = f"/v1/plugin-bindings/{name}:invoke"
    key = {"Idempotency-Key": "k"}
    ok = await ask("POST", path, {"input": {}}, org="alpha", headers=key)
    assert ok.status == 200, ok.document
    seen = ok.document["value"]["checkpoint"]["data"]
    gateway = seen["body"]["context"]["gateway"]
    assert gateway == {"base_url": URL, "delegation_token": "[secret]", "scopes": SCOPES}
    # It is the token that the command made for this call.
    assert seen["sha"] == hashlib.sha256(token_of(ok.document["id"]).encode()).hexdigest()
    again = await ask("POST", path, {"input": {}}, org="alpha", headers=key)
    assert again.headers["idempotency-replayed"] == "true"
    failing = {"input": {"trigger": {"type": "user_request", "do": "fail"}}}
    bad = await ask("POST", path, failing, org="alpha")
    assert (bad.status, bad.document["error"]["message"]) == (422, "[secret]"), bad.document
    progress = {"input": {"trigger": {"type": "user_request", "do": "progress", "count": 2}}}
    raw = await ask.door.ask(_stream(path, progress))
    assert raw.count(b"[secret]") > 2, raw
    streamed = raw.split(b'"id": "call_', 1)[-1].split(b'"', 1)[0].decode()
    return [ok.document["id"], bad.document["id"], f"call_{streamed}"], [ok, again, bad, raw]


def _stream(path: str, document: Any) -> bytes:
    body = json.dumps(document).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n"
    head += f"Authorization: Bearer {'a' * 40}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


def _what_the_command_was_told(program: Path, name: str, calls: list[str]) -> None:
    asked = [json.loads(line) for line in Path(f"{program}.asked").read_text().splitlines()]
    # One token for each call, and none for an answer that is repeated.
    assert [each["invocation_id"] for each in asked] == calls
    for each in asked:
        assert (each["binding_id"], each["org_id"], each["project_id"]) == (name, "alpha", None)
        assert (each["base_url"], each["scopes"]) == (URL, SCOPES)
        assert each["seconds"] == 1800 + 10  # its deadline and its grace


async def _the_audit(ask: ControlHouse, name: str, calls: list[str]) -> None:
    rows = (await ask("GET", "/audit?what=delegation")).document["audit"]
    assert [each["detail"]["invocation_id"] for each in reversed(rows)] == calls
    for each in rows:
        assert (each["caller"], each["plugin"]) == ("org:alpha", f"binding:{name}")
        assert (each["detail"]["scopes"], each["detail"]["expires_in"]) == (SCOPES, 1810.0)


async def _an_org_without_a_gateway(ask: ControlHouse, name: str) -> None:
    made = await ask("POST", f"/v1/plugin-bindings/{name}:invoke", {"input": {}}, org="beta")
    assert made.status == 200, made.document
    assert "gateway" not in made.document["value"]["checkpoint"]["data"]["body"]["context"]
    assert made.document["invocation"]["permissions"]["effective"]["egress"] == []


async def _a_command_that_fails(ask: ControlHouse, program: Path, name: str) -> Any:
    await trio.Path(program).write_text("#!/bin/sh\necho vai_dlg_spilled >&2; exit 3\n")
    made = await ask("POST", f"/v1/plugin-bindings/{name}:invoke", {"input": {}}, org="alpha")
    assert (made.status, made.document["invocation"]["code"]) == (400, "auth.delegation_failed")
    assert "gave no token (status 3)" in made.document["error"]["message"]
    return made


# --- what the command says ----------------------------------------------------------------------------------

ANSWERS = {
    "the smallest": ('{"token": "t-12345678", "expires_in": 30}', ("a:r", "b:w")),
    "fewer scopes": ('{"token": "t-12345678", "expires_in": 1, "scopes": ["a:r"]}', ("a:r",)),
    "as long as it may": ('{"token": "t-12345678", "expires_in": 60}', ("a:r", "b:w")),
    "longer than it may": ('{"token": "t-12345678", "expires_in": 61}', "gateway_token_lifetime allows more"),
    "a token alone": ("t-12345678", "a JSON object with a token"),
    "no token": ('{"expires_in": 30}', "a JSON object with a token"),
    "an empty token": ('{"token": "", "expires_in": 30}', "a JSON object with a token"),
    "a short token": ('{"token": "t-12345", "expires_in": 30}', "it could not be hidden"),
    "no end": ('{"token": "t-12345678"}', "did not say in expires_in"),
    "an end that is no number": ('{"token": "t-12345678", "expires_in": true}', "did not say in expires_in"),
    "over already": ('{"token": "t-12345678", "expires_in": 0}', "did not say in expires_in"),
    "odd scopes": ('{"token": "t-12345678", "expires_in": 1, "scopes": "a:r"}', "not a list of texts"),
    "nothing": ("", "gave no token"),
}


@pytest.mark.trio
async def test_a_token_that_its_command_may_not_give(tmp_path: Path) -> None:
    request = DelegationRequest(("a:r", "b:w"), 29.5, "call_1", "acme")
    results: dict[str, Any] = {}
    for name, (text, _) in ANSWERS.items():
        settings = OrgApiGateway(URL, ("/bin/echo", text), 60.0)
        try:
            results[name] = await gateway(settings).delegate(request)
        except HostError as error:
            results[name] = str(error)

    def check(name: str, row: tuple[str, Any]) -> None:
        if isinstance(row[1], tuple):
            assert results[name] == Delegation(URL, "t-12345678", row[1])
        else:
            assert row[1] in results[name] and "t-1234" not in results[name]

    check_rows(ANSWERS, check)
    # Without a lifetime of the operator's, it may live as long as the call and its grace.
    short = OrgApiGateway(URL, ("/bin/echo", '{"token": "t-12345678", "expires_in": 31}'))
    with pytest.raises(HostError, match="may for 30 s"):
        await gateway(short).delegate(request)


@pytest.mark.trio
async def test_no_token_without_a_call_and_without_the_audit() -> None:
    request = DelegationRequest(("a:r",), 29.5, "call_1", "acme")
    settings = OrgApiGateway(URL, ("/bin/echo", '{"token": "t-12345678", "expires_in": 30}'))
    assert (await gateway(None).delegate(request)).scopes == ()
    with pytest.raises(HostError, match="the call is over"):
        await gateway(settings, caller=None).delegate(request)
    with pytest.raises(HostError, match="cannot be written to the audit"):
        await gateway(settings, audit=DatabaseUnusable("full", "")).delegate(request)


def gateway(
    settings: OrgApiGateway | None, *, caller: str | None = "org:acme", audit: Exception | None = None
) -> BindingApiGateway:
    class Audit:
        async def note(self, *row: str) -> None:
            assert "t-12345678" not in repr(row)
            if audit is not None:
                raise audit

    async def hold(call: str, token: str) -> str | None:
        assert (call, token) == ("call_1", "t-12345678")
        return caller

    return BindingApiGateway("bind_1", lambda: settings, hold, Audit())  # type: ignore[arg-type]
