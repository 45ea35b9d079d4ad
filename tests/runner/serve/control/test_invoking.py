"""The routes by which orgs use their bindings: who may ask for what, and what is answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from runner.contracts.vai.binding import is_selected
from runner.launch.remote import forkserver
from tests.runner.serve.control.market import TOKENS, Answered, ControlHouse, open_market
from tests.runner.serve.control.plane import put_devkit
from tests.runner.serve.house import TOKEN, request
from tests.runner.serve.page.test_sessions import begin, made_code, secrets_of

pytestmark = [pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]
EVENT = {"type": "run.completed", "subject": {"kind": "run", "id": "run_1"}, "summary": {}}
RECORDS = "/v1/plugin-invocations"


@pytest.mark.trio
async def test_orgs_use_their_bindings_and_no_others(
    plugin_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    put_devkit(plugin_dir / "devkit-0.1.0-one", telling=True)
    try:
        async with open_market(plugin_dir, said) as ask:
            with trio.fail_after(300):
                names = await _bind_all(ask)
                await _answers_of_routes(ask, names)
                with monkeypatch.context() as patch:
                    patch.setattr("runner.serve.control.invoking._MOST_CALLS", 0)
                    path = f"/v1/plugin-bindings/{names['alpha search']}:invoke"
                    assert (await ask("POST", path, {}, org="alpha")).code == "overloaded"
                calls = await _calls_and_records(ask, names)
                await _a_call_of_another_org(ask, names, calls)
                delivery = await _events(ask, names)
                await _what_others_see(ask, delivery)
            for org in TOKENS:  # nothing that is kept or said has a secret in it
                assert not _files_with(plugin_dir, f"the secret of {org}")
                assert not [line for line in said if f"the secret of {org}" in line]
    finally:
        forkserver.close()


async def _bind_all(ask: ControlHouse) -> dict[str, str]:
    """Bindings by org and export. Of `reader` there are two versions of alpha."""
    for version in ("0.1.0", "0.2.0"):
        assert (await ask.import_(ask.market.package(version))).status == 201
    names = {}
    for org in TOKENS:
        for export in ("search", "notify", "reader"):
            slots = {"api_key": f"secret://{org}/key"} if export == "search" else {}
            made = await ask.bind(org, scope={"org_id": org}, export_id=export, secrets=slots)
            assert made.status == 201, made.document
            names[f"{org} {export}"] = made.document["binding_id"]
    more = {"scope": {"org_id": "alpha"}, "export_id": "reader", "secrets": {}}
    assert (await ask.bind("alpha", **more, package_version="0.2.0")).status == 201
    scope = {"org_id": "alpha", "project_id": "p"}
    made = await ask.bind("alpha", **{**more, "scope": scope}, rollout={"traffic_percent": 25})
    names["alpha p"] = made.document["binding_id"]
    return names


async def _answers_of_routes(ask: ControlHouse, names: dict[str, str]) -> None:
    own, theirs = names["alpha search"], names["beta search"]
    by_id, by_export = f"/v1/plugin-bindings/{own}", "/v1/plugin-tools"
    other = f"/v1/plugin-bindings/{theirs}"
    outside = next(
        each for each in _sessions() if not is_selected(names["alpha p"], {"session_id": each}, 25)
    )
    left_out = {"context": {"session_id": outside, "project_id": "p"}}
    rows: tuple[tuple[str, str, str, Any, int, str], ...] = (
        # What is another org's does not exist; the operator's own request shows that it does.
        ("alpha", "POST", f"{other}:invoke", {}, 404, "unknown_binding"),
        ("alpha", "POST", f"{other}:select", {"session_ids": ["s"]}, 404, "unknown_binding"),
        ("", "POST", f"{other}:select", {"session_ids": ["s"]}, 200, ""),
        ("beta", "POST", f"{other}:select", {"session_ids": ["s"]}, 200, ""),
        ("alpha", "POST", f"{by_export}/search:invoke", {"context": {"org_id": "beta"}}, 403, "other_org"),
        ("alpha", "POST", f"{by_id}:invoke", {"context": {"org_id": "beta"}}, 400, "invalid_call"),
        ("alpha", "GET", f"{RECORDS}?org=beta", None, 403, "other_org"),
        ("alpha", "GET", f"{RECORDS}?org=alpha", None, 200, ""),
        ("alpha", "POST", "/v1/plugin-events", {"org_id": "beta", "event": EVENT}, 403, "other_org"),
        ("stranger", "POST", f"{by_id}:invoke", {}, 401, "wrong_token"),
        (TOKEN.decode(), "POST", f"{by_id}:invoke", {}, 403, "org_required"),
        # A binding is called by its own routes alone.
        ("", "POST", f"/plugins/binding:{own}/calls", {"tool": "search"}, 404, "unknown_plugin"),
        ("", "POST", f"/plugins/binding:{own}%231/calls", {"tool": "search"}, 404, "unknown_plugin"),
        (
            "",
            "POST",
            "/deliveries",
            {"plugin": f"binding:{own}", "hook": "x", "event": {}},
            404,
            "unknown_plugin",
        ),
        # The choice of a binding.
        ("alpha", "POST", f"{by_export}/reader:invoke", {}, 409, "several_bindings"),
        ("alpha", "POST", f"{by_export}/reader:invoke", {"package_id": "acme/x"}, 404, "no_such_binding"),
        (
            "alpha",
            "POST",
            f"{by_export}/reader:invoke",
            left_out,
            400,
            "invalid_call",
        ),  # not the org's instead
        ("alpha", "POST", f"{by_export}/window:invoke", {}, 404, "no_such_binding"),
        ("alpha", "POST", "/v1/plugin-things/search:invoke", {}, 404, "no_route"),
        ("", "POST", f"{by_export}/search:invoke", {}, 400, "invalid_body"),  # for which org?
        # What is wrong is told.
        ("alpha", "POST", f"{by_id}:invoke", {"what": 1}, 400, "invalid_body"),
        ("alpha", "POST", f"{by_id}:invoke", {"context": []}, 400, "invalid_body"),
        ("alpha", "POST", f"{by_id}:invoke", {"context": {"invocation_id": "i"}}, 400, "invalid_body"),
        ("alpha", "POST", f"{by_id}:invoke", {"package_id": "acme/devkit"}, 400, "invalid_body"),
        ("alpha", "POST", f"{by_id}:invoke", {"context": {"stray": "x"}}, 400, "invalid_call"),
        ("alpha", "POST", f"{by_export}/search:invoke", {"context": {"project_id": 1}}, 400, "invalid_body"),
        ("alpha", "POST", f"{by_id}:select", {"session_ids": "s"}, 400, "invalid_body"),
        ("alpha", "POST", f"{by_id}:select", {"session_ids": ["s"] * 10_001}, 413, "too_many_sessions"),
        ("alpha", "GET", f"{RECORDS}?since=yesterday", None, 400, "invalid_query"),
        ("alpha", "GET", f"{RECORDS}?status=good", None, 400, "invalid_query"),
        ("alpha", "GET", f"{RECORDS}?limit=many", None, 400, "invalid_query"),
        ("alpha", "GET", f"{RECORDS}?stray=1", None, 400, "invalid_query"),
        ("alpha", "GET", f"{RECORDS}/call_unknown", None, 404, "no_such_call"),
        ("alpha", "DELETE", f"{RECORDS}/call_unknown", None, 404, "no_such_call"),
        ("alpha", "POST", "/v1/plugin-events", {"event": {"no": "type"}}, 400, "invalid_event"),
        ("alpha", "POST", "/v1/plugin-events", {"event": EVENT, "session_id": ""}, 400, "invalid_event"),
        ("alpha", "POST", "/v1/plugin-events", {"event": EVENT, "stray": 1}, 400, "invalid_event"),
        ("alpha", "GET", "/v1/plugin-events/none", None, 404, "no_such_event"),
    )
    for org, method, path, document, status, code in rows:
        found = await ask(method, path, document, org=org, tcp=bool(org))
        assert (found.status, found.code if status >= 400 else "") == (status, code), (org, path, found)


async def _calls_and_records(ask: ControlHouse, names: dict[str, str]) -> dict[str, str]:
    """Make a call of each org. Returns their ids."""
    calls = {}
    for org in TOKENS:
        given = {"input": {"do": "progress"}, "context": {"session_id": f"session of {org}"}}
        found = await ask("POST", "/v1/plugin-tools/search:invoke", given, org=org)
        assert (found.status, found.document["invocation"]["binding_id"]) == (200, names[f"{org} search"])
        assert f"the secret of {org}" not in json.dumps(found.document)
        calls[org] = found.document["id"]
    for org, other in (("alpha", "beta"), ("beta", "alpha")):
        records = (await ask("GET", RECORDS, org=org)).document["invocations"]
        assert {each["org_id"] for each in records} == {org}
        assert (await ask("GET", f"{RECORDS}?binding={names[f'{other} search']}", org=org)).document == {
            "invocations": [],
            "after": None,
        }
        assert (await ask("GET", f"{RECORDS}/{calls[other]}", org=org)).status == 404
        (own,) = [each for each in records if each["invocation_id"] == calls[org]]
        assert (own["status"], own["session_id"]) == ("succeeded", f"session of {org}")
        assert (await ask("GET", f"{RECORDS}/{calls[org]}", org=org)).document == own
        since = (await ask("GET", f"{RECORDS}?status=succeeded&since={own['started_at']}", org=org)).document
        assert [each["invocation_id"] for each in since["invocations"]] == [calls[org]]
        until = await ask("GET", f"{RECORDS}?until={own['started_at']}", org=org)
        assert calls[org] not in json.dumps(until.document)
    everything = (await ask("GET", f"{RECORDS}?limit=1000")).document["invocations"]
    pages: list[Any] = []
    query = "limit=2"
    while query:
        page = (await ask("GET", f"{RECORDS}?{query}")).document
        pages += page["invocations"]
        query = "" if page["after"] is None else f"limit=2&after={page['after']}"
    assert pages == everything and len({each["org_id"] for each in pages}) == 2
    lines = await _lines(ask, "alpha")
    assert lines == (await ask("GET", RECORDS, org="alpha")).document["invocations"]
    return calls


async def _lines(ask: ControlHouse, org: str) -> list[Any]:
    head = f"GET {RECORDS} HTTP/1.1\r\nAccept: application/x-ndjson\r\nHost: localhost\r\n"
    raw = await ask.door.ask(f"{head}Authorization: Bearer {TOKENS[org]}\r\n\r\n".encode())
    return [json.loads(line) for line in raw.partition(b"\r\n\r\n")[2].splitlines()]


async def _a_call_of_another_org(ask: ControlHouse, names: dict[str, str], calls: dict[str, str]) -> None:
    """A call that streams, which only its own org can cancel."""
    body = json.dumps({"input": {"do": "wait", "count": 1}}).encode()
    lines = [f"POST /v1/plugin-bindings/{names['beta search']}:invoke HTTP/1.1", "Host: localhost"]
    lines += ["Accept: text/event-stream", f"Authorization: Bearer {TOKENS['beta']}"]
    lines += [f"Content-Length: {len(body)}", "", ""]
    async with await ask.door.connect() as stream:
        await stream.send_all("\r\n".join(lines).encode() + body)
        seen = b""
        while b"event: progress" not in seen:
            seen += await stream.receive_some(4096)
        call = json.loads(seen.partition(b"event: accepted\ndata: ")[2].partition(b"\n")[0])["id"]
        assert (await ask("DELETE", f"{RECORDS}/{call}", org="alpha")).code == "no_such_call"
        assert (await ask("DELETE", f"{RECORDS}/{call}", org="beta")).status == 202
        while b"event: error" not in seen:
            seen += await stream.receive_some(4096)
    assert b"the secret of beta" not in seen and b"[secret]" in seen
    record = await _recorded(ask, call, "beta")
    assert (record["status"], record["stderr_tail"].count("told user_cancelled")) == ("cancelled", 1)


async def _recorded(ask: ControlHouse, call: str, org: str) -> dict[str, Any]:
    while True:
        found: Answered = await ask("GET", f"{RECORDS}/{call}", org=org)
        if found.status == 200:
            document: dict[str, Any] = found.document
            return document
        await trio.sleep(0.01)


async def _what_others_see(ask: ControlHouse, delivery: str) -> None:
    """Bindings are plugins of the supervisor. Callers with the daemon's own token do not find them."""
    shown = [each["name"] for each in (await ask("GET", "/plugins")).document["plugins"]]
    (name, *_) = [each for each in shown if each.startswith("binding:")]
    path = f"/plugins/{name.replace('#', '%23')}"
    for method, each in (("GET", path), ("POST", f"{path}/stop"), ("GET", f"{path}/logs")):
        assert (await ask(method, each, org=TOKEN.decode(), tcp=True)).code == "unknown_plugin"
    assert (await ask("GET", path)).status == 200  # it does exist
    listed = await ask("GET", "/plugins", org=TOKEN.decode(), tcp=True)
    assert listed.document["plugins"] == []
    asked = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n"
    by_token = await ask.door.ask(f"{asked}Authorization: Bearer {TOKEN.decode()}\r\n\r\n".encode(), tcp=True)
    by_operator = await ask.door.ask(f"{asked}\r\n".encode())
    assert b'plugin="bindings"' in by_token and b"bind_" not in by_token and b"bind_" in by_operator
    # Nor does the page, which is a caller on the network. What the operator sees is the control.
    await ask("GET", "/nowhere", org="alpha")
    shown_by_page = await _shown_by_page(ask)
    for word in ("bind_", "binding:", "org:", *TOKENS):
        assert word not in json.dumps(shown_by_page), (word, shown_by_page)
    assert "uid:" in json.dumps(shown_by_page["connections"]) and shown_by_page["samples"]
    told = [(await ask("GET", path)).document for path in ("/plugins", "/calls", "/audit?most=1000")]
    assert all("org:" in json.dumps(each) or "binding:" in json.dumps(each) for each in told)
    assert (await ask("GET", f"/deliveries/{delivery}", org=TOKEN.decode(), tcp=True)).status == 404
    assert (await ask("GET", f"/deliveries/{delivery}")).status == 200


async def _shown_by_page(ask: ControlHouse) -> dict[str, Any]:
    """The sections that the page's stream begins with."""
    cookie, key = secrets_of(await begin(ask.door, await made_code(ask.door)))
    shown = (f"Host: 127.0.0.1:{ask.door.tcp}", f"Cookie: {cookie.split(';')[0]}", f"Runner-Page: {key}")
    async with await ask.door.connect(tcp=True) as stream:
        await stream.send_all(request("/page/stream", *shown))
        raw = b""
        while not (b"event: connections" in raw and b"event: samples" in raw and raw.endswith(b"\n\n\r\n")):
            raw += await stream.receive_some(1 << 16)
    return {
        block.split("\n")[0]: json.loads(block.split("\ndata: ")[1].split("\n")[0])
        for block in raw.decode().split("event: ")[1:]
    }


async def _events(ask: ControlHouse, names: dict[str, str]) -> str:
    """Returns the id of a delivery."""
    sent = {}
    for org in TOKENS:  # the same id in two orgs is two events
        sent[org] = (await ask("POST", "/v1/plugin-events", {"id": "e", "event": EVENT}, org=org)).document
        assert [each["binding_id"] for each in sent[org]["deliveries"]] == [names[f"{org} notify"]]
        again = await ask("POST", "/v1/plugin-events", {"id": "e", "event": EVENT}, org=org)
        assert again.document["deliveries"][0]["id"] == sent[org]["deliveries"][0]["id"]
    other = {**EVENT, "summary": {"other": 1}}
    assert (await ask("POST", "/v1/plugin-events", {"id": "e", "event": other}, org="beta")).code == (
        "delivery_conflict"
    )
    assert (await ask("GET", f"/v1/plugin-events/{sent['beta']['id']}", org="alpha")).status == 404
    for org in TOKENS:
        while True:
            found = (await ask("GET", "/v1/plugin-events/e", org=org)).document["deliveries"]
            if found[0]["state"] == "acked":
                break
            await trio.sleep(0.01)
        assert [each["binding_id"] for each in found] == [names[f"{org} notify"]]
    delivery: str = found[0]["id"]
    return delivery


def _sessions() -> list[str]:
    return [f"session_{number}" for number in range(1000)]


def _files_with(folder: Path, secret: str) -> list[Path]:
    """The databases that have it."""
    found = list(folder.glob("**/*.db*"))
    assert len(found) > 3
    return [path for path in found if secret.encode() in path.read_bytes()]
