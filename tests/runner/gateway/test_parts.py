"""Names, settings, limits and lists of the gateway, without a process."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import sys
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from runner.approvals.tools import ToolRecord
from runner.cli.serving.serve import _gateway
from runner.exceptions import PluginFailure
from runner.extras import install_command
from runner.gateway.audit import AuditedMaker, AuditFile, hide
from runner.gateway.calls import SupervisedMaker
from runner.gateway.catalogue import Catalogue
from runner.gateway.http import FORGET_SECONDS, MOST_CALLERS, HttpGateway, open_gateway
from runner.gateway.names import MOST_NAME, plugin_part, public_name, public_uri, split_uri
from runner.gateway.questions import ClientQuestions, ClientRequest
from runner.gateway.rate import RateLimit
from runner.gateway.server import ClientGateway
from runner.gateway.settings import ClientSettings, GatewaySettings
from runner.gateway.settings_file import read_settings
from runner.gateway.tool_source import Lists
from runner.gateway.translate import Shown, shown
from runner.outcome import Outcome
from runner.protocol.calls import CallRequest
from runner.protocol.dialect import Notice
from runner.serve.desk import CallAnswer
from runner.serve.mounted import CannotMount, DaemonParts, Mounted
from runner.serve.pending import Confirmation, PendingConfirmations
from runner.serve.refusal import Refused
from sandbox.document.diagnostic import DocumentError
from tests.conftest import ROOT

# Names that plugins and tools may choose to be taken for each other.
HOSTILE = (
    *("a", "a_", "a__b", "_a", "a__", "b__c", "c", "_b", "__", "b", "-", ""),
    *("a.b", "a b", "a-b", "ä", "a\nb", "x" * 29, "x" * 30, "x" * 31, "x" * 64, "x" * 200, "\udc80"),
    *("a--b-0123456789ab", "b-0123456789ab", "0123456789ab", "a-0123456789AB"),
)


def test_no_two_tools_share_a_name_and_none_changes() -> None:
    made: dict[str, tuple[str, str]] = {}
    for plugin in filter(None, HOSTILE):
        for tool in filter(None, HOSTILE):
            name = public_name(plugin, tool)
            assert re.fullmatch(r"[A-Za-z0-9_-]+", name, re.ASCII) and len(name) <= MOST_NAME
            assert name.startswith(plugin_part(plugin) + "__")
            assert "__" not in plugin_part(plugin) and not plugin_part(plugin).endswith("_")
            assert made.setdefault(name, (plugin, tool)) == (plugin, tool)
    # A name that somebody computed for another one's tool does not become that tool.
    short = public_name("notes", "find all")
    for plugin in filter(None, HOSTILE):
        assert public_name(plugin, short.partition("__")[2]) != short
    assert public_name("a", "b__c") == "a__b__c"  # the usual case is plain
    assert public_name("notes", "find") == "notes__find"
    assert public_name("notes", "find all") == "notes__find-all-" + short[-12:]


def test_uris_lead_back_to_their_plugin() -> None:
    for plugin in ("notes", "a.b"):
        for uri in ("file:///x", "memo://a/b?c#d", "runner:other/x", "note:"):
            assert split_uri(public_uri(plugin, uri)) == (plugin_part(plugin), uri)
    assert [split_uri(uri) for uri in ("file:///x", "runner:", "runner:x", "runner:x/", "runner:/y")] == [
        None
    ] * 5


FAULTS: Mapping[str, str] = {
    "[clients.a]\ntols = []": ":2:1: unknown_key: there is no key 'tols' here",
    "client = 1": ":1:1: unknown_key: there is no key 'client' here",
    "[clients]\na = 1": ":2:1: invalid_type: clients.a has to be a table",
    "[clients]\nint = 1": ":2:1: invalid_type: clients.int has to be a table",
    "[clients.a]\ntools = 'x'": ":2:1: invalid_type: tools has to be a list of texts",
    "[clients.a]\ncalls_per_minute = 0": ":2:1: invalid_type: calls_per_minute has to be a whole number",
    "[clients.a]\ncalls_per_minute = true": ":2:1: invalid_type: calls_per_minute",
    "[clients.a]\nrename = {x__y = 'z__w'}": ": bad_name: the new name of 'x__y' cannot be used",
    "[clients.a]\nrename = {x__y = 'z', x__w = 'z'}": ": name_taken: two tools cannot both be called 'z'",
    "[clients.a]\nconfirm = ['*', 'destructve']": ":2:17: bad_pattern: 'destructve' can be no tool's public",
    '[clients.a]\nconfirm = ["a\\u001b*"]': ":2:12: bad_pattern: 'a\\x1b*' is not a text",
    "[clients.a]\nconfirm_wait = '11m'": ":2:1: bad_time: confirm_wait has to be from 1s to 600s",
    "[clients.a]\nconfirm_by = 'operators'": ":2:1: invalid_value: confirm_by is 'operators'",
    "webhook = 'http://x.example'": ":1:1: bad_url: webhook has to begin with https://",
    "[remotes.a]\nurl = 'https://x.example'\nclient_secret_file = '/s'": ":3:1: no_issuer: client_secret",
    "[remotes.a]\nurl = 'https://x.example'\ncallback_port = 0": ":3:1: invalid_type: callback_port has",
    "[remotes.a]\nurl = 'https://x.example'\ntoken_file = '/t'\nclient_id = 'c'": ":4:1: two_tokens: ",
    "[remotes.a]\nurl = 'https://x.example/mcp'\ntoken = 'abc'": ":3:1: literal_token: token: a token does",
    "[remotes.a]\nurl = 'https://me:pw@x.example/mcp'": ":2:1: bad_url: url has to begin with https://",
    "[remotes.a]\ntoken_file = 'x'": ":1:10: missing_key: the remote 'a' has no url",
    "[plugins.a]\nfoldr = 'x'": ":2:1: unknown_key: there is no key 'foldr' here",
    "[plugins.a]\nlimits = 5": ":2:1: invalid_type: limits has to be a table",
    "[plugins.a]\nlimits = {cal = '5s'}": ": bad_limit: no limit is called 'cal'",
    "[plugins.a]\nlimits = {call = 'soon'}": ": bad_limit: call: ",
    "[plugins.a]\nhide = ['T@*']": ":2:9: hide: 'T@*' stands for every name",
    "[plugins.a]\nssh = ['*.b']": ":2:8: ssh: '*.b' stands for several hosts",
    "[plugins.a]\nfolder = 1": ":2:1: invalid_type: folder has to be a text",
    "trust_first = 1": ":1:1: invalid_type: trust_first has to be true or false",
    "x = [": ": toml_syntax: ",
}


def test_settings(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    for text, message in FAULTS.items():
        path.write_text(text)
        with pytest.raises(DocumentError) as caught:
            read_settings(str(path))
        told = "\n".join(each.text() for each in caught.value.diagnostics)
        assert f"{path}{message}" in told or message in told, (text, told)
    path.write_text('[clients.default]\nplugins = ["a*"]\n[clients.b]\nrename = {a__x = "y"}\n')
    settings = read_settings(str(path))
    assert settings.client("nobody").sees_plugin("ab") and not settings.client("nobody").sees_plugin("b")
    other = settings.client("b")
    assert other.sees_plugin("b") and other.shown_as("a__x") == "y" and other.meant_by("y") == "a__x"
    assert other.meant_by("a__x") == ""  # the old name is gone
    path.write_text('[plugins.a]\nfolder = "p/a"\n[plugins.b]\nfolder = "/b"\n')
    assert read_settings(str(path)).folders == {"a": f"{tmp_path}/p/a", "b": "/b"}
    path.write_text('[clients.a]\npolicy = "p/a.toml"\n[clients.b]\npolicy = "strict"\n')
    assert [read_settings(str(path)).client(name).policy for name in "ab"] == [
        f"{tmp_path}/p/a.toml",
        "strict",
    ]
    path.write_text('[plugins.a]\nlimits = {call = "30s"}\nhide = ["T@a.b"]\nssh = ["a.b:22"]\n')
    wanted = {"limits": {"call": "30s"}, "staged": False, "hide": ("T@a.b",), "ssh": ("a.b:22",)}
    assert read_settings(str(path)).plugins == {"a": wanted}
    path.chmod(0o666)
    with pytest.raises(DocumentError, match="settings_untrusted"):
        read_settings(str(path))


def test_a_minutes_calls_at_once_and_then_one_by_one() -> None:
    now = [0.0]
    rate = RateLimit(6, lambda: now[0])
    assert [rate.take() for _ in range(8)] == [0, 0, 0, 0, 0, 0, 10, 10]
    now[0] = 9.0
    assert rate.take() == pytest.approx(1)
    now[0] = 10.0
    assert [rate.take(), rate.take()] == [0, pytest.approx(10)]
    assert [RateLimit(0, lambda: 0.0).take() for _ in range(1000)] == [0] * 1000


def test_secrets_are_not_in_bodies() -> None:
    given = {
        "query": "x",
        "apiKey": "s",
        "nested": [{"Password": "s", "note": "n"}],
        "x-auth-token": {"a": "s"},
    }
    for odd in ("[" * 100_000, '{"token": "t'):
        assert hide(odd) == odd
    given["content"] = [{"type": "text", "text": json.dumps(given)}]
    assert '"s' not in str(hide(given)) and '"x' in str(hide(given))
    assert "'s'" not in str(hide(given)) and "'n'" in str(hide(given)) and "'x'" in str(hide(given))


class FakeSource:
    """A plugin whose list arrives when the test says so."""

    passes = True
    moved = held = False
    maker = None

    def __init__(self, name: str) -> None:
        self.name = self.mark = self.identity = self.look = name
        self.ready = trio.Event()
        self.failure: Exception | None = None
        self.asked = 0
        self.tools: Sequence[Mapping[str, Any]] = [{"name": "t", "inputSchema": {"type": "object"}}]

    async def lists(self) -> Lists:
        self.asked += 1
        await self.ready.wait()
        if self.failure is not None:
            raise self.failure
        return {"tools": self.tools}

    def origin(self) -> str:
        return self.mark

    def result(self, tool: str, value: Any) -> dict[str, Any]:
        raise NotImplementedError


async def run_here(function: Any, *args: Any) -> Any:
    await trio.lowlevel.checkpoint()
    return function(*args)


async def listed(catalogue: Catalogue) -> list[str]:
    return [name for known in await catalogue.all() for name in known.shown.get("tools", ())]


@pytest.mark.trio
async def test_a_slow_plugin_keeps_nobody_back(
    nursery: trio.Nursery,
    autojump_clock: trio.testing.MockClock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The clock would jump while a thread reads the record.
    monkeypatch.setattr(trio.to_thread, "run_sync", run_here)
    quick, slow, broken = map(FakeSource, ("quick", "slow", "broken"))
    quick.ready.set()
    broken.ready.set()
    broken.failure = PluginFailure(Outcome("crashed", "handshake", "it ended"))
    said: list[str] = []
    changed = trio.Event()

    def hear(what: str) -> None:
        changed.set()

    sources = [quick, slow, broken]
    catalogue = Catalogue(nursery, lambda: sources, ToolRecord.at(tmp_path / "tools"), said.append, seconds=5)
    catalogue.on_changed.append(hear)
    began = trio.current_time()
    assert await listed(catalogue) == ["quick__t"]
    assert trio.current_time() - began == 5
    assert said == ["broken: its tools are missing: crashed: it ended"] and not changed.is_set()
    slow.ready.set()
    await changed.wait()
    assert await listed(catalogue) == ["quick__t", "slow__t"]
    assert (quick.asked, slow.asked, broken.asked) == (1, 1, 1)  # the broken one not at every list
    await trio.sleep(20)
    broken.failure = None
    assert await listed(catalogue) == ["broken__t", "quick__t", "slow__t"]
    # It announces a change: an approved tool with another description is withheld, the list gets shorter.
    changed = trio.Event()
    quick.tools = [{"name": "t", "description": "now with teeth", "inputSchema": {"type": "object"}}]
    catalogue.changed("quick")
    await changed.wait()
    assert await listed(catalogue) == ["broken__t", "slow__t"]
    assert "'t' is withheld" in said[-1] and said[-1].endswith("accept it: quick")
    [(source, tool)] = catalogue.withheld()
    assert (source.name, tool.name, tool.acceptable) == ("quick", "t", True) and "description" in tool.reason
    # What no record can hold cannot be accepted, so that nobody is told to.
    quick.tools = [*quick.tools, {"name": "u", "description": "x" * 100_000}]
    catalogue.changed("quick")
    await catalogue._known["quick"].done.wait()
    assert {tool.name: tool.acceptable for _, tool in catalogue.withheld()} == {"t": True, "u": False}
    assert "'u' is withheld" in said[-1] and "accept it" not in said[-1]
    # One that is gone is not shown, and only the plugin of a name is asked for it.
    sources.remove(slow)
    await catalogue.reload()
    assert await catalogue.find("tools", "slow__t") is None
    nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_the_first_list_is_what_was_listed_last(
    nursery: trio.Nursery,
    autojump_clock: trio.testing.MockClock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another start of the gateway: no plugin has answered yet."""
    monkeypatch.setattr(trio.to_thread, "run_sync", run_here)
    names = ("same", "other", "broken", "changed", "held")
    said: list[str] = []
    remarks: list[tuple[str, str]] = []
    changed: list[str] = []

    def catalogue(sources: Sequence[FakeSource]) -> Catalogue:
        return Catalogue(nursery, lambda: sources, ToolRecord.at(tmp_path / "tools"), said.append, seconds=5)

    first = [FakeSource(name) for name in names]
    for each in first:
        each.ready.set()
    assert len(await listed(catalogue(first))) == 5

    _, other, broken, moved, held = again = [FakeSource(name) for name in names]
    moved.mark, held.held = "another entry", True
    other.tools = [{"name": "u", "inputSchema": {"type": "object"}}]
    broken.failure = PluginFailure(Outcome("crashed", "handshake", "it ended"))
    one = catalogue(again)
    one.on_changed.append(changed.append)
    one.on_remark.append(lambda *remark: remarks.append(remark))
    moved.ready.set()
    held.ready.set()
    held.failure = PluginFailure(Outcome("policy_denied", "launch", "it is pending"))
    began = trio.current_time()
    assert await listed(one) == ["broken__t", "changed__t", "other__t", "same__t"]
    assert trio.current_time() == began  # nobody waits for a plugin whose list is known
    # A call needs the plugin's own list: it may have changed, or be gone.
    found: dict[str, Shown | None] = {}

    async def find(name: str) -> None:
        found[name] = await one.find("tools", name)

    async with trio.open_nursery() as finding:
        for name in ("same__t", "other__t", "broken__t"):
            finding.start_soon(find, name)
        await trio.testing.wait_all_tasks_blocked()
        assert not found and not changed
        for each in again:
            each.ready.set()
    assert found["other__t"] is found["broken__t"] is None
    assert found["same__t"] is not None and found["same__t"].own == "t"
    assert remarks[:2] == [
        ("held", "held: its tools are missing: policy_denied: it is pending"),
        ("broken", "broken: its tools are missing: crashed: it ended"),
    ]
    assert remarks[2][0] == "other" and "'u' is withheld: it is new" in remarks[2][1]
    assert said == [text for _, text in remarks] and set(changed) == {"tools"} and len(changed) == 2
    assert await listed(one) == ["changed__t", "same__t"]
    assert [each.asked for each in again] == [1] * 5
    # A record that cannot be read: the plugin is waited for.
    for path in (tmp_path / "tools").glob("*.json"):
        path.write_text("{}")
    assert await listed(catalogue([FakeSource("same")])) == []
    nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_name_that_two_have_stays_with_the_one_that_had_it_or_is_nobodys(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    """A plugin chooses its name, so that it can be made to have the short form of another one's."""

    def source(name: str, identity: str) -> FakeSource:
        made = FakeSource(name)
        made.identity = made.look = made.mark = identity
        made.tools = [{"name": identity, "inputSchema": {"type": "object"}}]
        made.ready.set()
        return made

    first, hostile, remote = source("mail", "first"), source("mail", "hostile"), source("mail", "remote")
    remote.maker = remote  # type: ignore[assignment]
    sources, said = [hostile], list[str]()

    def catalogue() -> Catalogue:
        return Catalogue(nursery, lambda: sources, ToolRecord.at(tmp_path / "tools"), said.append)

    assert await listed(catalogue()) == ["mail__hostile"]  # the control: alone, it is shown
    one = catalogue()
    sources[:] = [first]
    assert await listed(one) == ["mail__first"]
    sources[:] = [hostile, first]
    assert await listed(one) == ["mail__first"]
    assert said == ["mail is left out: mail has the same name or short name"]
    assert await listed(catalogue()) == []  # at the beginning, neither the order nor a race decides
    sources[:] = [hostile, first, remote]  # the settings name the server elsewhere
    for each in (one, catalogue()):
        assert await listed(each) == ["mail__remote"]
    nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_list_that_was_replaced_while_it_was_judged(
    nursery: trio.Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, changed, judging = FakeSource("one"), trio.Event(), trio.Event()
    source.ready.set()
    catalogue = Catalogue(nursery, lambda: [source], ToolRecord.at(tmp_path / "tools"), lambda text: None)
    assert await listed(catalogue) == ["one__t"]
    catalogue.on_changed.append(lambda what: changed.set())

    async def late(function: Any, *args: Any) -> Any:
        monkeypatch.undo()  # only the first one is late
        judging.set()
        judged = function(*args)
        await changed.wait()
        return judged

    monkeypatch.setattr(trio.to_thread, "run_sync", late)
    async with trio.open_nursery() as reloading:
        reloading.start_soon(catalogue.reload)
        await judging.wait()
        source.tools = ()
        catalogue.changed("one")
    assert await listed(catalogue) == []
    nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_list_that_takes_long_to_judge_holds_up_nobody(
    nursery: trio.Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin can give entries that take seconds to check, and say at once that they have changed."""
    source = FakeSource("one")
    source.ready.set()
    meanwhile: list[str] = []
    said: list[str] = []

    def check(*args: Any, **options: Any) -> Shown:
        trio.from_thread.run_sync(meanwhile.append, "the loop of all plugins goes on")
        return shown(*args, **options)

    monkeypatch.setattr("runner.gateway.catalogue.shown", check)
    catalogue = Catalogue(nursery, lambda: [source], ToolRecord.at(tmp_path / "tools"), lambda text: None)
    assert await listed(catalogue) == ["one__t"] and meanwhile
    # Every client that asks for the list pays for all of it.
    monkeypatch.setattr("runner.gateway.catalogue.MOST_VALUES", 1000)
    costly = {"name": "u", "inputSchema": {"type": "object"}, "icons": [{"src": ""}] * 40}
    source.tools = [*source.tools, *({**costly, "name": f"u{n}"} for n in range(20))]
    catalogue = Catalogue(nursery, lambda: [source], ToolRecord.at(tmp_path / "others"), said.append)
    assert len(await listed(catalogue)) == 12 and len(said) == 9
    assert "more than 1000 lists, objects and keys" in said[0]
    nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_record_that_cannot_be_written_ends_nobody(
    nursery: trio.Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon reads the record again after each change of the configuration, in a task of its own."""
    source, said = FakeSource("one"), list[str]()
    source.ready.set()
    catalogue = Catalogue(nursery, lambda: [source], ToolRecord.at(tmp_path / "tools"), said.append)
    assert await listed(catalogue) == ["one__t"]

    def judge(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ToolRecord, "judge", judge)
    await catalogue.reload()
    assert catalogue._known["one"].shown == {} and "No space left on device" in said[0]
    nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_plugin_whose_lists_cost_much_is_asked_rarely(
    nursery: trio.Nursery,
    autojump_clock: trio.testing.MockClock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trio.to_thread, "run_sync", run_here)
    source = FakeSource("one")
    source.ready.set()
    rests = []
    for seconds in (0.0, 5.0):  # of processor time that judging takes
        spent = itertools.count(0.0, seconds)
        monkeypatch.setattr("runner.gateway.catalogue.thread_time", lambda spent=spent: next(spent))
        catalogue = Catalogue(nursery, lambda: [source], ToolRecord.at(tmp_path / "tools"), lambda text: None)
        await listed(catalogue)
        began = trio.current_time()
        catalogue.changed("one")  # as often as it likes
        await catalogue._known["one"].done.wait()
        rests.append(trio.current_time() - began)
    assert rests[0] <= 1.5 and rests[1] >= 99
    nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_call_that_the_audit_cannot_hold(tmp_path: Path) -> None:
    class OneMaker:
        async def make(self, call: CallRequest) -> CallAnswer:
            return CallAnswer(200, {"value": "done"})

    file = AuditFile(str(tmp_path / "audit"))
    call = CallRequest("p", "t", {}, "tool", caller="me")
    assert await AuditedMaker(OneMaker(), file, bodies=False).make(call) == CallAnswer(200, {"value": "done"})
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file._fd)
    os.close(full)
    made = await AuditedMaker(OneMaker(), file, bodies=False).make(call)
    os.close(file._fd)
    assert not made.is_ok
    assert made.error["message"] == (
        "the call was made, but it cannot be written to the audit: No space left on device"
    )


def http_gateway(
    nursery: trio.Nursery, home: Path, pending: PendingConfirmations | None = None
) -> HttpGateway:
    """The application at the door of a daemon without plugins."""
    _, no_news = trio.open_memory_channel[Any](0)
    parts: Any = SimpleNamespace(
        desk=None,
        roster=SimpleNamespace(sources=list),
        supervisor=SimpleNamespace(subscribe=lambda: no_news),
        pending=pending or PendingConfirmations(),
        ledger=None,
    )
    return open_gateway(GatewaySettings(), {"HOME": str(home)})(parts, nursery, lambda text: None)


async def post(gateway: HttpGateway, caller: str, method: str = "ping") -> int:
    """The status of the answer to a message."""
    return (await exchange(gateway, caller, method))[0]


async def exchange(
    gateway: HttpGateway, caller: str, method: str, session: str = "", verb: str = "POST"
) -> tuple[int, str]:
    """The status of the answer to a message, and the session that it names."""
    about = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": about}
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    headers.append((b"accept", b"application/json, text/event-stream"))
    if session:
        headers.append((b"mcp-session-id", session.encode()))
    scope = {"type": "http", "method": verb, "path": "/mcp", "query_string": b"", "headers": headers}
    given = [{"type": "http.request", "body": json.dumps(message).encode(), "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        return given.pop() if given else await trio.sleep_forever()

    async def send(message: Any) -> None:
        sent.append(message)

    await gateway({**scope, "state": {"caller": caller}}, receive, send)
    named = dict(sent[0]["headers"]).get(b"mcp-session-id", b"")
    return sent[0]["status"], named.decode()


@pytest.mark.trio
async def test_callers_by_certificate_are_bounded(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, tmp_path: Path
) -> None:
    gateway = http_gateway(nursery, tmp_path)
    assert await post(gateway, "cert:CN=0", "initialize") == 200  # it keeps a session
    for number in range(1, MOST_CALLERS):
        assert await post(gateway, f"cert:CN={number}") != 503
    with pytest.raises(Refused, match="64 callers use /mcp") as refused:
        await post(gateway, "cert:CN=new")
    assert refused.value.status == 503 and refused.value.headers() == {"Retry-After": "60"}
    assert await post(gateway, "cert:CN=1", "initialize") == 200  # those that are there go on
    await trio.sleep(FORGET_SECONDS)
    assert await post(gateway, "cert:CN=new", "initialize") == 200
    # The two with a session are still there, and all others have made room.
    assert sorted(gateway._callers) == ["cert:CN=0", "cert:CN=1", "cert:CN=new"]
    await trio.testing.wait_all_tasks_blocked()
    assert len(gateway._catalogue.on_changed) == 3
    nursery.cancel_scope.cancel()


@pytest.mark.trio
@pytest.mark.parametrize("is_mended", [True, False])
async def test_sessions_that_nobody_uses_lock_nobody_out(
    nursery: trio.Nursery,
    autojump_clock: trio.testing.MockClock,
    tmp_path: Path,
    is_mended: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not is_mended:  # the control: the SDK's own
        admit = StreamableHTTPSessionManager._admit_session
        monkeypatch.setattr("runner.gateway.http._Sessions._admit_session", admit)
    monkeypatch.setattr("runner.gateway.http._MOST_SESSIONS", 6)
    gateway = http_gateway(nursery, tmp_path)

    async def begin() -> tuple[int, str]:
        await trio.sleep(1)
        return await exchange(gateway, "token", "initialize")

    async def ask(session: str, times: int = 1) -> int:
        return [(await exchange(gateway, "token", "ping", session))[0] for _ in range(times)][-1]

    _, used = await begin()
    assert await ask(used, 3) == 200
    _, listening = await begin()
    nursery.start_soon(exchange, gateway, "token", "", listening, "GET")
    _, ready = await begin()
    assert await ask(ready) == 200
    others = [(await begin())[1] for _ in range(3)]
    assert await exchange(gateway, "else", "initialize") != (503, "")  # other callers have their own
    if not is_mended:
        assert (await begin())[0] == 503
        nursery.cancel_scope.cancel()
        return
    for _ in range(20):
        assert (await begin())[0] == 200
    await trio.testing.wait_all_tasks_blocked()
    assert [await ask(each) for each in (ready, *others)] == [404] * 4
    assert await ask(used) == await ask(listening) == 200
    # Where all are used, the one that is idle longest makes room, and none with a request in work does.
    for _ in range(4):
        _, new = await begin()
        await ask(new, 3)
    assert [(await begin())[0], await ask(used)] == [200, 404]
    assert await ask(listening) == 200
    sessions = gateway._callers["token"].manager._server_instances
    for each in set(sessions) - {listening}:
        nursery.start_soon(exchange, gateway, "token", "", each, "GET")
    await trio.testing.wait_all_tasks_blocked()
    assert (await begin())[0] == 503 and len(sessions) == 6
    nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_sessions_that_have_ended_leave_nothing(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, tmp_path: Path
) -> None:
    gateway = http_gateway(nursery, tmp_path)
    for _ in range(10):
        _, session = await exchange(gateway, "token", "initialize")
        for verb in ("POST", "DELETE"):
            assert (await exchange(gateway, "token", "ping", session, verb))[0] == 200
        await trio.testing.wait_all_tasks_blocked()
    manager = gateway._callers["token"].manager
    assert not manager._server_instances and len(manager._uses) <= 1
    nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_session_that_does_not_read_keeps_no_news_from_others(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, tmp_path: Path
) -> None:
    told = trio.Event()

    async def tell() -> None:
        told.set()

    async def answer(context: Any) -> None: ...

    catalogue = Catalogue(nursery, list, ToolRecord.at(tmp_path / "tools"), lambda text: None)
    maker = SupervisedMaker(None)  # type: ignore[arg-type]
    client = ClientGateway(catalogue, maker, ClientQuestions(), "me", ClientSettings(), nursery)
    for key, send in (("stuck", trio.sleep_forever), ("other", tell)):
        session = SimpleNamespace(send_tool_list_changed=send)
        request = SimpleNamespace(headers={"mcp-session-id": key})
        context: Any = SimpleNamespace(
            method="ping", request_id=1, protocol_version="2025-11-25", session=session, request=request
        )
        await client._remember(context, answer)
    catalogue.on_changed[0]("tools")
    with trio.fail_after(60):
        await told.wait()
    nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_news_for_a_client_that_does_not_read_are_small(nursery: trio.Nursery, tmp_path: Path) -> None:
    """A plugin can send messages of 16 MiB faster than a client reads: 256 of them wait."""
    catalogue = Catalogue(nursery, list, ToolRecord.at(tmp_path / "tools"), lambda text: None)
    questions, told = ClientQuestions(), list[Any]()
    client: Any

    class Chatty:
        async def make(self, call: CallRequest) -> CallAnswer:
            for number in range(300):
                client.hear("one", Notice("log", {"level": "info", "data": "x" * (1 << 20)}))
                client.hear("one", Notice("log", {"level": "info", "data": [["x" * (1 << 20)], number]}))
                client.hear("one", Notice("changed", {"resource": "x:" + "y" * (1 << 20)}))
                assert call.on_progress is not None
                call.on_progress({"progress": number, "message": "x" * (1 << 20)})
            told.append(tracemalloc.get_traced_memory()[0])
            return CallAnswer(200, {"value": "done"})

    client = ClientGateway(catalogue, Chatty(), questions, "me", ClientSettings(), nursery)
    sent: list[Any] = []

    async def send(*args: Any) -> None:
        sent.append(args)

    session = SimpleNamespace(send_log_message=send, report_progress=send)
    context: Any = SimpleNamespace(session=session, request=None, meta={"progress_token": 1})
    request = ClientRequest(client, context, "tool t")
    tracemalloc.start()
    try:
        made = await client._make(request, FakeSource("one"), "t", {}, "tool")
    finally:
        tracemalloc.stop()
    assert made.value == "done" and told[0] < 32 << 20
    await trio.testing.wait_all_tasks_blocked()
    client.hear("one", Notice("log", {"level": "info", "data": {"fields": list(range(300))}}))
    await trio.testing.wait_all_tasks_blocked()
    assert sent[-1][1] == {"fields": list(range(300))}  # the control: a usual one passes as it is
    nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_text_whose_call_is_answered_meanwhile_waits_for_the_next_request(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    """The newer protocol drops a log on a request that has its answer."""
    catalogue = Catalogue(nursery, list, ToolRecord.at(tmp_path / "tools"), lambda text: None)
    client: Any

    class Refused:
        async def make(self, call: CallRequest) -> CallAnswer:
            client.tell("one", "warning", "during")
            await trio.testing.wait_all_tasks_blocked()
            client.tell("one", "warning", "at the end")
            return CallAnswer(200, {"value": "done"})

    client = ClientGateway(catalogue, Refused(), ClientQuestions(), "me", ClientSettings(), nursery)

    def context(of: str, sent: list[tuple[str, str]]) -> Any:
        async def send(level: str, text: str, logger: str) -> None:
            sent.append((of, text))

        session = SimpleNamespace(send_log_message=send)
        return SimpleNamespace(
            session=session,
            request=None,
            meta={},
            method="ping",
            request_id=1,
            protocol_version=MODERN_PROTOCOL_VERSIONS[0],
        )

    async def answer(context: Any) -> None: ...

    sent: list[tuple[str, str]] = []
    await client._make(
        ClientRequest(client, context("call", sent), "tool t"), FakeSource("one"), "t", {}, "tool"
    )
    await trio.testing.wait_all_tasks_blocked()
    assert sent == [("call", "during")]
    await client._remember(context("next", sent), answer)
    assert sent == [("call", "during"), ("next", "at the end")]
    nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_without_the_extra_the_door_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("runner.gateway.http")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mcp.server.streamable_http_manager", None)
    mount = _gateway(None)
    with pytest.raises(CannotMount, match="is missing") as caught:
        mount.load()
    assert caught.value.remedy == install_command("gateway")
    said: list[str] = []
    mounted = Mounted(mount, said.append)
    mounted.parts = DaemonParts(None, None, None, None, None)  # type: ignore[arg-type]
    with pytest.raises(Refused, match="is missing") as refused:
        await mounted({"type": "http", "path": "/mcp"}, None, None)  # type: ignore[arg-type]
    # Where it is installed is for those who run the daemon.
    told = str(refused.value.document())
    assert refused.value.status == 501 and "the daemon's stderr has the command" in told
    assert said[0].endswith(caught.value.remedy) and str(ROOT) not in told


@pytest.mark.trio
async def test_the_page_shows_what_waits(nursery: trio.Nursery, tmp_path: Path) -> None:
    pending = PendingConfirmations()
    gateway = http_gateway(nursery, tmp_path, pending)
    pending.note(Confirmation("host", "", "git", "example.com:443", (), "runner allow x --net example.com"))
    nursery.start_soon(pending.ask, Confirmation("call", "token", "git", "git__push", ("a: 1", "b: 2")), 60.0)
    await trio.testing.wait_all_tasks_blocked()
    numbers = [row["id"] for row in pending.list()]
    assert [tuple(row.values()) for row in gateway.questions()] == [
        ("git", "example.com:443", "it was refused", f"runner ctl approve {numbers[0]}"),
        ("git", "git__push", "token waits for your yes: a: 1; b: 2", f"runner ctl approve {numbers[1]}"),
    ]
    nursery.cancel_scope.cancel()
