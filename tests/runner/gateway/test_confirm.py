"""A person is asked before a call: at the official client, at the daemon, or nowhere, which is a no."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
import trio
import trio.testing
from mcp import Client
from mcp.shared.memory import create_client_server_memory_streams

from runner.approvals.confirmations import (
    MOST_LINE,
    MOST_LINES,
    ConfirmationRecord,
    argument_lines,
    may_destroy,
    needs_confirmation,
)
from runner.approvals.record import ApprovalsUnusable
from runner.approvals.tools import ToolRecord
from runner.gateway.catalogue import Catalogue
from runner.gateway.confirm import Confirmer
from runner.gateway.questions import ClientQuestions
from runner.gateway.remote import RemoteSource
from runner.gateway.server import ClientGateway
from runner.gateway.settings import ClientSettings, RemoteSettings
from runner.gateway.webhook import Webhook
from runner.protocol.https.failure import FetchFailed
from runner.protocol.https.request import HttpsRequest
from runner.protocol.https.response import HttpsResponse
from runner.serve.pending import MOST_OF_OWNER, Confirmation, Consent, PendingConfirmations
from sandbox.policy.policy import NetworkRule
from tests.runner.gateway.entries import text
from tests.tables import check_rows

URL = "https://git.example/mcp"
RULE = NetworkRule(ceiling="allowlist", hosts=("git.example:443", "hooks.example:443"))
ASKED = ClientSettings(confirm=("git__push*", "destructive"), confirm_seconds=60.0)
TOOLS = {
    "push": {"readOnlyHint": True},
    "log": {"readOnlyHint": True},
    "drop": {"readOnlyHint": False},
    "add": {"destructiveHint": False},
    "silent": None,
}


class Elsewhere:
    """A server elsewhere with these tools, and what was called there."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.description = "Reads a log."

    async def ask(self, request: HttpsRequest, *_: Any) -> HttpsResponse:
        asked = json.loads(request.body or b"")
        result: dict[str, Any] = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}}
        if asked["method"] == "tools/list":
            notes = {name: {} if each is None else {"annotations": each} for name, each in TOOLS.items()}
            usual = {"inputSchema": {"type": "object"}, "description": self.description}
            result = {"tools": [{"name": name, **usual, **each} for name, each in notes.items()]}
        elif asked["method"] == "tools/call":
            self.called.append(asked["params"]["name"])
            result = {"content": [{"type": "text", "text": "done"}]}
        answer = {"jsonrpc": "2.0", "id": asked.get("id"), "result": result}
        return HttpsResponse(200, (), json.dumps(answer).encode(), request.url)


class Person:
    """At the official client: answers each confirmation with the next of these."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.offered: Sequence[str] = ()

    async def answer(self, context: Any, params: Any) -> types.ElicitResult:
        self.asked.append(params.message)
        self.offered = params.requested_schema["properties"].get("remember", {}).get("enum", ())
        answer = self.answers.pop(0)
        if answer is None:
            await trio.sleep_forever()
        if isinstance(answer, str):
            return types.ElicitResult(action=answer)  # type: ignore[arg-type]
        return types.ElicitResult(action="accept", content=answer)


class Rig:
    """A gateway for one client, with the server elsewhere behind it."""

    def __init__(self, home: Path, nursery: trio.Nursery, settings: ClientSettings, **more: Any) -> None:
        self.server, self.noted = Elsewhere(), list[Mapping[str, Any]]()
        self.record = ConfirmationRecord({"HOME": str(home)})
        self.source = RemoteSource(RemoteSettings("git", URL), RULE, self.server.ask)
        self.catalogue = Catalogue(
            nursery, lambda: [self.source], ToolRecord.at(home / "tools"), lambda _: None
        )
        confirmer = Confirmer("me", settings, self.record, more.pop("note", self._note), **more)
        self.gateway = ClientGateway(
            self.catalogue, self.source, ClientQuestions(), "me", settings, nursery, confirmer
        )
        self._nursery = nursery

    async def _note(self, entry: Mapping[str, Any]) -> None:
        self.noted.append(entry)

    @asynccontextmanager
    async def client(self, mode: Any, person: Person | None) -> AsyncIterator[Client]:
        callback = {} if person is None else {"elicitation_callback": person.answer}
        async with Client(self._transport(), mode=mode, **callback) as client:  # type: ignore[arg-type]
            yield client

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        server = self.gateway.server()
        async with create_client_server_memory_streams() as (here, there):
            self._nursery.start_soon(server.run, *there, server.create_initialization_options())
            yield here


@asynccontextmanager
async def rig(home: Path, settings: ClientSettings = ASKED, **more: Any) -> AsyncIterator[Rig]:
    async with trio.open_nursery() as nursery:
        yield Rig(home, nursery, settings, **more)
        nursery.cancel_scope.cancel()


async def outcome(client: Client, tool: str, **given: Any) -> str:
    """'done', or the message of the error."""
    result = await client.call_tool(f"git__{tool}", given)
    return text(result)


MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])
quiet = pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")


@MODES
@quiet
@pytest.mark.trio
async def test_the_person_at_the_client_is_asked(tmp_path: Path, mode: str) -> None:
    person = Person(
        {}, "decline", {"remember": "session"}, {"remember": "forever"}, "cancel", {"remember": "always"}
    )
    async with rig(tmp_path) as made:
        async with made.client(mode, person) as client:
            for tool in ("log", "add"):  # nobody is asked
                assert await outcome(client, tool) == "done"
            assert not person.asked
            assert await outcome(client, "push", branch="main\x1b[2J\nYes was said.", force=True) == "done"
            [shown] = person.asked
            assert shown.split("\n") == [
                "May git__push be called with this?",
                'branch: "main\\u001b[2J\\nYes was said."',
                "force: true",
                "No answer within 60 s is a no.",
            ]
            refused = await outcome(client, "push", branch="main")  # once is once
            assert "nobody allowed this call: the person at the client said no" in refused
            assert "the same call was refused a moment ago" in await outcome(client, "push", branch="main")
            for _ in range(2):
                assert await outcome(client, "drop") == "done"
            assert len(person.asked) == 3
            assert "no answer that counts" in await outcome(client, "silent", a=1)
            assert "said no" in await outcome(client, "silent", a=2)
            for _ in range(2):
                assert await outcome(client, "silent", a=3) == "done"
            assert not person.answers
        assert made.server.called == ["log", "add", "push", "drop", "drop", "silent", "silent"]
        assert [(each["subject"], each["allowed"], each["remembered"]) for each in made.noted] == [
            ("git__push", True, "once"),
            ("git__push", False, "once"),
            ("git__push", False, "once"),
            ("git__drop", True, "session"),
            ("git__silent", False, "once"),
            ("git__silent", False, "once"),
            ("git__silent", True, "always"),
        ]
    # The next gateway of the same person. `allow --confirm` takes what was said for good back.
    person = Person("decline", "decline")
    async with rig(tmp_path) as made, made.client(mode, person) as client:
        assert await outcome(client, "silent") == "done"
        assert "said no" in await outcome(client, "drop")
        made.record.set_patterns(made.source.identity, ("lo*",))
        assert "said no" in await outcome(client, "log")
        assert made.server.called == ["silent"]


@MODES
@quiet
@pytest.mark.trio
async def test_no_answer_is_a_no(tmp_path: Path, mode: str, mock_clock: trio.testing.MockClock) -> None:
    person = Person(None)
    async with rig(tmp_path) as made, made.client(mode, person) as client, trio.open_nursery() as nursery:

        async def make() -> None:
            said.append(await outcome(client, "push"))

        said: list[str] = []
        nursery.start_soon(make)
        while not person.asked:
            await trio.lowlevel.checkpoint()
        mock_clock.jump(61)
        while not made.noted:
            await trio.lowlevel.checkpoint()
        assert [each["allowed"] for each in made.noted] == [False] and not made.server.called
        while mode == "legacy" and not said:  # a client of the newer protocol has to come back for its answer
            await trio.lowlevel.checkpoint()
        assert all("nobody answered within 60 s" in each for each in said)
        nursery.cancel_scope.cancel()


@quiet
@pytest.mark.trio
async def test_who_cannot_be_asked_says_no(tmp_path: Path) -> None:
    by_operator = ASKED._replace(confirm_by="operator")
    for settings, person in ((ASKED, None), (by_operator, Person())):
        async with rig(tmp_path, settings) as made, made.client("auto", person) as client:
            refused = await outcome(client, "push")
            assert "this client asks nobody, and there is no daemon that could" in refused
            assert not made.server.called


@quiet
@pytest.mark.trio
async def test_what_cannot_be_read_or_recorded_says_no(tmp_path: Path) -> None:
    async def full(entry: Mapping[str, Any]) -> None:
        raise OSError(28, os.strerror(28))

    async with rig(tmp_path, note=full) as made, made.client("legacy", Person({})) as client:
        assert "the answer cannot be recorded" in await outcome(client, "push")
        made.record.set_patterns(made.source.identity, ())
        [kept] = (tmp_path / ".config/runner/approvals/confirmations").glob("*.json")
        kept.write_text("{")
        assert "the record of confirmations" in await outcome(client, "log")
        kept.chmod(0o666)
        with pytest.raises(ApprovalsUnusable, match="can be written by"):
            made.record.read(made.source.identity)
        assert not made.server.called


@pytest.mark.trio
async def test_only_a_host_can_be_asked_about(tmp_path: Path) -> None:
    """A plugin chooses the names that it looks up, and a yes to a rule could stand for every host."""
    pending = PendingConfirmations()
    settings = ASKED._replace(confirm=("hosts",))
    async with rig(tmp_path, settings, pending=pending) as made:
        confirmer = made.gateway._confirmer
        assert confirmer is not None
        for rule in (
            *("api.example.com:443", "192.0.2.1:443", "*.com:443", "*:443", "api.example.com:*"),
            *("GET api.example.com:443", "GET,POST api.example.com:443/**", "localhost:5432", "x y:443"),
            *("a.example.com:1-60", "", "--yes"),
        ):
            option = shlex.join(("--net", rule))
            confirmer.refused_host("git", {"command": f"runner allow m {option}", "option": option})
        assert [row["subject"] for row in pending.list()] == ["api.example.com:443", "192.0.2.1:443"]


@quiet
@pytest.mark.trio
async def test_a_tool_that_changes_meanwhile_is_not_called(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:

        class Slow(Person):
            async def answer(self, context: Any, params: Any) -> types.ElicitResult:
                made.server.description = "Reads a log. Then deletes it."
                await made.catalogue.reload()
                made.catalogue.changed("git")
                while "push" not in str(list(made.catalogue.withheld())):
                    await trio.lowlevel.checkpoint()
                return await super().answer(context, params)

        async with made.client("legacy", Slow({})) as client:
            with pytest.raises(Exception, match="there is no tool 'git__push' here"):
                await outcome(client, "push")
        assert not made.server.called


@quiet
@pytest.mark.trio
async def test_a_yes_is_for_the_plugin_that_was_asked_about(tmp_path: Path) -> None:
    """And not for another one that comes in its place, with the same tools."""
    async with rig(tmp_path) as made:

        async def replace() -> None:
            settings = RemoteSettings("git", f"{made.source.mark}/other".removeprefix("remote git "))
            made.source = RemoteSource(settings, RULE, made.server.ask)
            await made.catalogue.reload()

        class Slow(Person):
            async def answer(self, context: Any, params: Any) -> types.ElicitResult:
                if len(self.asked) == 1:
                    await replace()
                return await super().answer(context, params)

        person = Slow({"remember": "session"}, {}, "decline")
        async with made.client("legacy", person) as client:
            assert await outcome(client, "drop") == await outcome(client, "drop") == "done"
            assert "changed while a person was asked" in await outcome(client, "push")
            assert "said no" in await outcome(client, "drop")
        assert made.server.called == ["drop", "drop"] and not person.answers


@quiet
@pytest.mark.trio
async def test_a_no_is_for_a_minute(tmp_path: Path, mock_clock: trio.testing.MockClock) -> None:
    """However often the call is tried meanwhile."""
    person = Person("decline", {})
    async with rig(tmp_path) as made, made.client("legacy", person) as client:
        assert "said no" in await outcome(client, "push")
        for seconds in (1, 58):
            mock_clock.jump(seconds)
            assert "refused a moment ago" in await outcome(client, "push")
        mock_clock.jump(1)
        assert await outcome(client, "push") == "done"


@quiet
@pytest.mark.trio
async def test_the_operator_answers_at_the_daemon(tmp_path: Path) -> None:
    pending, outcomes = PendingConfirmations(), dict[str, str]()
    told: list[Mapping[str, Any]] = []
    pending.on_asked = told.append
    async with rig(tmp_path, pending=pending, keeps=False) as made, made.client("legacy", None) as client:

        async def make(**given: Any) -> None:
            outcomes[str(given)] = await outcome(client, "push", **given)

        async with trio.open_nursery() as nursery:
            for number in range(MOST_OF_OWNER):
                nursery.start_soon(partial(make, number=number))
            while len(pending.list()) < MOST_OF_OWNER:
                await trio.lowlevel.checkpoint()
            for _ in range(2):  # nobody has said no to it, so it may be asked about later
                more = await outcome(client, "push", number=99)
                assert "8 confirmations about the client me wait for an answer" in more
            rows = {row["lines"][0]: row["id"] for row in pending.list()}
            assert sorted(rows) == [f"number: {number}" for number in range(MOST_OF_OWNER)]
            for number in range(MOST_OF_OWNER):
                row = pending.decide(rows[f"number: {number}"], Consent(number == 3, "session", "uid:0"))
                assert (row["client"], row["subject"]) == ("me", "git__push")
                with pytest.raises(KeyError):  # twice
                    pending.decide(row["id"], Consent(True))
        assert {given: said for given, said in outcomes.items() if said == "done"} == {
            "{'number': 3}": "done"
        }
        assert await outcome(client, "push", number=100) == "done"  # remembered for this session
        assert made.server.called == ["push", "push"] and len(told) == MOST_OF_OWNER
        assert not pending.list()

        # A client that gives up takes its confirmation along.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.call_tool, "git__drop", {})
            while not pending.list():
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        while pending.list():
            await trio.lowlevel.checkpoint()
        assert "drop" not in made.server.called


@quiet
@pytest.mark.trio
async def test_an_answer_is_noted_also_if_its_client_has_gone(tmp_path: Path) -> None:
    pending, noted, is_noted = PendingConfirmations(), list[bool](), trio.Event()

    async def note(entry: Mapping[str, Any]) -> None:
        await trio.testing.wait_all_tasks_blocked()  # the client has gone
        noted.append(entry["allowed"])
        is_noted.set()

    async with rig(tmp_path, pending=pending, note=note) as made, made.client("legacy", None) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outcome, client, "push")
            while not pending.list():
                await trio.lowlevel.checkpoint()
            pending.decide(pending.list()[0]["id"], Consent(True, by="uid:0"))
            nursery.cancel_scope.cancel()
        with trio.move_on_after(10):
            await is_noted.wait()
        assert noted == [True]


@pytest.mark.trio
async def test_an_answer_that_is_late_counts_for_nothing(mock_clock: trio.testing.MockClock) -> None:
    pending, consents = PendingConfirmations(), list[Consent]()

    async def ask() -> None:
        consents.append(await pending.ask(Confirmation("call", "me", "git", "git__push"), 5.0))

    async with trio.open_nursery() as nursery:
        for seconds in (4.0, 5.0):
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            [row] = pending.list()
            mock_clock.jump(seconds)  # the one who waits has not noticed yet
            if seconds < 5:
                pending.decide(row["id"], Consent(True))
            else:
                with pytest.raises(KeyError):
                    pending.decide(row["id"], Consent(True))
            while len(consents) < (1 if seconds < 5 else 2):
                await trio.lowlevel.checkpoint()
    assert [each.allowed for each in consents] == [True, False]


@pytest.mark.trio
async def test_questions_end_in_time(autojump_clock: trio.testing.MockClock) -> None:
    pending = PendingConfirmations()
    confirmation = Confirmation("call", "me", "git", "git__push")
    consent = await pending.ask(confirmation, 5.0)
    assert not consent.allowed and consent.by == "nobody answered in time" and not pending.list()
    for number in range(20):  # a plugin that tries many hosts
        pending.note(Confirmation("host", "", "git", f"h{number % 12}.example:443", (), "runner allow"))
    rows = pending.list()
    assert len(rows) == MOST_OF_OWNER and len({row["subject"] for row in rows}) == MOST_OF_OWNER
    assert (await pending.ask(confirmation._replace(plugin="other"), 1.0)).by == "nobody answered in time"
    # After a no it is not listed again, however often the plugin tries.
    refused = Confirmation("host", "", "git", rows[0]["subject"], (), "runner allow")
    pending.decide(rows[0]["id"], Consent(False))
    pending.note(refused)
    assert rows[0]["subject"] not in {row["subject"] for row in pending.list()}
    pending.note(refused._replace(plugin="other"))  # that one may
    assert (rows[0]["subject"], "other") in {(row["subject"], row["plugin"]) for row in pending.list()}
    await trio.sleep(3600)
    assert not pending.list()


@pytest.mark.trio
async def test_a_webhook_is_told() -> None:
    sent: list[HttpsRequest] = []
    said: list[str] = []

    async def ask(request: HttpsRequest, *_: Any) -> HttpsResponse:
        sent.append(request)
        if len(sent) == 2:
            raise FetchFailed("timeout", "there was no whole answer")
        return HttpsResponse(500 if len(sent) == 3 else 204, (), b"", request.url)

    async with trio.open_nursery() as nursery:
        pending = PendingConfirmations()
        for url in ("https://hooks.example/x", "https://elsewhere.example/x"):
            webhook = Webhook(url, RULE, said.append, ask)
            pending.on_asked = webhook.tell
            nursery.start_soon(webhook.run)
            for number in range(3):
                pending.note(Confirmation("host", "", f"git{number}", f"{url}:443"))
            await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    # By itself it asks no address of this machine, also if the policy lists it.
    own = NetworkRule(ceiling="allowlist", hosts=("127.0.0.1:443",))
    async with trio.open_nursery() as nursery:
        webhook = Webhook("https://127.0.0.1/x", own, said.append)
        nursery.start_soon(webhook.run)
        webhook.tell({"id": "q1"})
        while len(said) < 6:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert "the confirmation q1: 127.0.0.1:443 was not asked: its address" in said.pop()
    assert [json.loads(each.body or b"")["plugin"] for each in sent] == ["git0", "git1", "git2"]
    assert len(said) == 5 and "there was no whole answer" in said[0] and "the status 500" in said[1]
    assert "the policy does not list the host elsewhere.example:443" in said[2]


DESTROYS: Mapping[str, tuple[object, bool]] = {
    "nothing said": (None, True),
    "no object": ("read-only", True),
    "read-only": ({"readOnlyHint": True}, False),
    "a text is no yes": ({"readOnlyHint": "true"}, True),
    "it adds only": ({"readOnlyHint": False, "destructiveHint": False}, False),
    "a number is no no": ({"destructiveHint": 0}, True),
    "both": ({"readOnlyHint": False, "destructiveHint": True}, True),
}


def test_what_may_destroy() -> None:
    def check(name: str, row: tuple[object, bool]) -> None:
        assert may_destroy(row[0]) is row[1]

    check_rows(DESTROYS, check)
    assert not needs_confirmation((), "git__push", None)
    assert needs_confirmation(("log", "git__p*"), "git__push", {"readOnlyHint": True})
    assert not needs_confirmation(("hosts", "git__p?"), "git__push", {"readOnlyHint": True})


def test_arguments_for_people() -> None:
    long = argument_lines({"first": "x" * 5000, "second": {"a": [1, "\u202e\x07"]}})
    assert long[0].startswith('first: "xxx') and long[0].endswith(" … and 4802 further characters")
    assert len(long[0]) < MOST_LINE + 60 and long[1] == 'second: {"a": [1, "\\u202e\\u0007"]}'
    many = argument_lines({str(number): number for number in range(30)})
    assert len(many) == MOST_LINES + 1 and many[-1] == "… and 10 further arguments"
    assert argument_lines({"\n" * 100: 1})[0] == '"' + ("\\n" * 30)[:59] + "…: 1"
    # No name of an argument looks like a sentence of ours, and none pushes one out that the tool reads.
    bait = {f"{number} are harmless": True for number in range(MOST_LINES)}
    lines = argument_lines({**bait, "path": "/"}, {"properties": {"path": {}}})
    assert lines[:2] == ('path: "/"', '"0 are harmless": true')
    for schema in (None, {}, {"properties": "path"}):
        assert argument_lines({"a-b.c_1": 1}, schema) == ("a-b.c_1: 1",)
