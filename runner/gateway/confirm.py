"""Asking a person before a tool is called, and about hosts that a plugin was refused.

A client that can ask its person does so (elicitation). Else the confirmation waits at the daemon, for the
page and `runner ctl`; without a daemon the call is refused. No answer is a no. A person is shown the tool's
public name and the arguments, escaped and cut, and nothing that a plugin says about them.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import trio

from runner.approvals.confirmations import (
    HOSTS,
    MOST_LINE,
    ConfirmationRecord,
    argument_lines,
    needs_confirmation,
)
from runner.approvals.record import ApprovalsUnusable
from runner.gateway.questions import ClientRequest, can_answer
from runner.gateway.settings import ClientSettings
from runner.gateway.tool_source import ToolSource
from runner.gateway.translate import Shown
from runner.ledger.file import LedgerUnusable
from runner.outcome import Outcome
from runner.protocol.host_services import HostError
from runner.serve.pending import REMEMBERED, Confirmation, Consent, PendingConfirmations
from sandbox.document.diagnostic import cut, printable
from sandbox.network.rules import count_ports, parse_rule

_MOST_REMEMBERED = 1000  # answers, of all sessions of a client
_MOST_HOSTS = 32  # that one client is asked about
_AGAIN_SECONDS = 60.0  # after a no, the very same call is refused unasked
_ELICIT = "elicitation/create"

# Writes who decided what. Raises OSError or LedgerUnusable; then the call is not made.
Note = Callable[[Mapping[str, Any]], Awaitable[None]]
# Allows a plugin a host, by the approvals. Raises ApprovalsUnusable.
AllowHost = Callable[[str, str], Awaitable[None]]


class Confirmer:
    """Of one client."""

    def __init__(
        self,
        client: str,
        settings: ClientSettings,
        record: ConfirmationRecord,
        note: Note,
        pending: PendingConfirmations | None = None,
        allow_host: AllowHost | None = None,
        *,
        keeps: bool = True,
    ) -> None:
        """`pending`: of the daemon; None: there is none. `allow_host`: None: a yes of this client allows no
        host, because approvals are not its person's. `keeps`: whether its person may say yes for good."""
        self._client = client
        self._settings = settings
        self._record = record
        self._note = note
        self._pending = pending
        self._allow_host = allow_host
        self._offered = REMEMBERED if keeps else REMEMBERED[:-1]
        self._hosts: dict[tuple[str, str], str] = {}  # plugins and hosts to ask about, and what allows them
        self._hosts_asked: set[tuple[str, str]] = set()
        self._session_yes: dict[tuple[str, str, str], None] = {}  # sessions, plugins and their tools
        self._refused: dict[str, float] = {}  # digests of calls, until when

    async def refusal(
        self, request: ClientRequest, session: str | None, source: ToolSource, one: Shown, arguments: Any
    ) -> Outcome | None:
        """Why this call must not be made. None: it may be. `session`: None: there is none, for which a yes
        could count."""
        try:
            known = await trio.to_thread.run_sync(self._record.read, source.identity)
        except ApprovalsUnusable as unusable:
            return Outcome("policy_denied", "call", str(unusable), "confirmations", unusable.hint)
        annotations = one.entry.get("annotations")
        if not (
            needs_confirmation(self._settings.confirm, one.public, annotations)
            or needs_confirmation(known.patterns, one.own, annotations)
        ):
            return None
        of_session = (session, source.identity, one.own)
        if (self._client, one.own) in known.always or of_session in self._session_yes:
            return None
        digest = hashlib.sha256(
            json.dumps([session, one.public, arguments], sort_keys=True).encode()
        ).hexdigest()
        if self._was_refused(digest):
            consent = Consent(False, by="the same call was refused a moment ago", decided=False)
        else:
            lines = argument_lines(arguments, one.entry.get("inputSchema"))
            confirmation = Confirmation("call", self._client, one.plugin, one.public, lines)
            consent = await self._ask(request, confirmation, has_session=session is not None)
        try:
            await self._keep(session, source, one, consent, digest)
        except (ApprovalsUnusable, LedgerUnusable, OSError) as error:
            message = f"the answer cannot be recorded, so the call is not made: {error}"
            return Outcome("internal", "call", message, "record", getattr(error, "hint", ""))
        if consent.allowed:
            return None
        hint = "ask the person who runs the gateway, and call again after a yes"
        return Outcome(
            "policy_denied", "call", f"nobody allowed this call: {consent.by}", "not_confirmed", hint
        )

    def refused_host(self, plugin: str, advice: Mapping[str, Any]) -> None:
        """A plugin tried to reach a host that nobody has allowed. `advice`: the fields of an Advice."""
        command, words = advice.get("command", ""), shlex.split(advice.get("option", ""))
        if HOSTS not in self._settings.confirm or words[:1] != ["--net"] or not command:
            return  # no person can allow it
        host = words[-1]
        if not _is_one_host(host):
            return  # the plugin has put it together
        if self._allow_host is None:
            if self._pending is not None:
                self._pending.note(Confirmation("host", "", plugin, host, (), command))
        elif (plugin, host) not in self._hosts_asked and len(self._hosts_asked) < _MOST_HOSTS:
            self._hosts_asked.add((plugin, host))
            self._hosts[plugin, host] = command

    async def ask_about_hosts(self, request: ClientRequest, plugin: str) -> tuple[str, ...]:
        """Ask about each once, while this client's request is under way. Returns what has come of it."""
        told = []
        for of, host in [each for each in self._hosts if each[0] == plugin]:
            command = self._hosts.pop((of, host), "")
            if not command or self._allow_host is None or not self._can_elicit(request):
                continue
            confirmation = Confirmation("host", self._client, plugin, host, (), command)
            consent = await self._ask(request, confirmation)
            try:
                await self._note_answer({**confirmation._asdict(), **consent._asdict()})
                if consent.allowed:
                    await self._allow_host(plugin, host)
                    told.append(f"{host} is allowed for {plugin} now: call again")
            except (ApprovalsUnusable, LedgerUnusable, OSError) as error:
                told.append(f"{host} cannot be allowed so: {error}; type: {command}")
        return tuple(map(printable, told))

    async def _ask(
        self, request: ClientRequest, confirmation: Confirmation, *, has_session: bool = True
    ) -> Consent:
        seconds = self._settings.confirm_seconds
        offered = [each for each in self._offered if has_session or each != "session"]
        if not self._can_elicit(request):
            if self._pending is None:
                why = "this client asks nobody, and there is no daemon that could"
                return Consent(False, by=why, decided=False)
            return await self._pending.ask(confirmation, seconds)
        said: Any = {}
        with trio.move_on_after(seconds) as scope:
            try:
                said = await request.ask(_ELICIT, _form(confirmation, seconds, offered))
            except HostError as error:
                return Consent(False, by=printable(cut(f"the client says: {error}", MOST_LINE)))
        if scope.cancelled_caught:
            return Consent(False, by=f"nobody answered within {seconds:g} s")
        content = said.get("content")
        if said.get("action") != "accept" or not isinstance(content, Mapping):
            return Consent(False, by="the person at the client said no")
        word = content.get("remember", "once")
        if word not in offered or (confirmation.kind == "host" and content.get("allow") is not True):
            return Consent(False, by="the person at the client gave no answer that counts")
        return Consent(True, word, by="the person at the client")

    def _can_elicit(self, request: ClientRequest) -> bool:
        """By a form; a client may be able to open links only."""
        if self._settings.confirm_by == "operator" or not can_answer(request.context, _ELICIT):
            return False
        said = request.context.session.client_capabilities
        able = None if said is None else said.elicitation
        return able is not None and (able.form is not None or able.url is None)

    async def _keep(
        self, session: str | None, source: ToolSource, one: Shown, consent: Consent, digest: str
    ) -> None:
        """Raises ApprovalsUnusable, LedgerUnusable and OSError."""
        told = {"kind": "call", "client": self._client, "plugin": one.plugin, "subject": one.public}
        await self._note_answer({**told, "digest": digest, **consent._asdict()})
        if not consent.allowed and consent.decided:
            self._refused[digest] = trio.current_time() + _AGAIN_SECONDS
            _forget_oldest(self._refused)
        elif consent.remembered == "always":
            add = self._record.add_always
            await trio.to_thread.run_sync(add, source.identity, self._client, one.own)
        elif consent.remembered == "session" and session is not None:
            self._session_yes[session, source.identity, one.own] = None
            _forget_oldest(self._session_yes)

    async def _note_answer(self, entry: Mapping[str, Any]) -> None:
        """Also if its client has gone meanwhile: somebody has answered. Raises OSError and LedgerUnusable."""
        with trio.CancelScope(shield=True):
            await self._note(entry)

    def _was_refused(self, digest: str) -> bool:
        now = trio.current_time()
        self._refused = {each: until for each, until in self._refused.items() if now < until}
        return digest in self._refused


def _forget_oldest(answers: dict[Any, Any]) -> None:
    for gone in list(answers)[:-_MOST_REMEMBERED]:
        del answers[gone]


def _form(confirmation: Confirmation, seconds: float, offered: Sequence[str]) -> Mapping[str, Any]:
    over = f"No answer within {seconds:g} s is a no."
    if confirmation.kind == "host":
        told = f"{confirmation.plugin} tried to reach {confirmation.subject}, and was refused. May it reach"
        told += f" this host from now on? It can send there whatever it has. {over}"
        choice: Mapping[str, Any] = {"type": "boolean", "title": "Allow this host", "default": False}
        name, needed = "allow", ["allow"]
    else:
        told = "\n".join((f"May {confirmation.subject} be called with this?", *confirmation.lines, over))
        choice = {"type": "string", "title": "The yes counts", "enum": list(offered), "default": "once"}
        name, needed = "remember", []
    schema = {"type": "object", "properties": {name: choice}, "required": needed}
    return {"mode": "form", "message": printable_lines(told), "requestedSchema": schema}


def _is_one_host(text: str) -> bool:
    """And no rule that stands for several, which a plugin could have a person say yes to."""
    try:
        rule = parse_rule(text)
    except ValueError:
        return False
    return rule.kind in ("name", "address") and rule.methods is None and count_ports(rule.ports) == 1


def printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))
