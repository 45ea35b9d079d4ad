"""Tries a plugin by each rule of its contract, and returns the verdicts.

Rules that do not disturb each other share a process. A rule that was broken ends it, and the next rule is
tried with a new one: the verdict on a rule does not depend on the rules before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import trio

from runner.conformance.conversation import CageLaunch, RawConversation, RuleBroken, converse
from runner.conformance.report import Result, Transcript, TranscriptLine, Verdict
from runner.conformance.rules import MissingFact, RuleBook, TrialFacts, TriedRule, Watch
from runner.contracts.contract import Contract
from runner.exceptions import PluginFailure
from runner.launch.read import secret_contents
from runner.launch.stages import Invocation
from runner.outcome import Outcome
from runner.plugin import Plugin
from runner.protocol.dialect import Call, HandshakeFault, Setting
from runner.protocol.secrets import Secrets
from runner.protocol.wire import encode
from runner.session.prepared import cage_contents, complete_call, read_plugin

_ANSWERS_TOGETHER = 30  # the whole trial may take as long as this many answers that do not come


class TrialSubject(NamedTuple):
    """The plugin that is tried."""

    launch: CageLaunch
    plugin: Plugin | None  # None: it is a command
    call: Call | None
    secrets: Secrets  # none of these texts may be shown
    setting: Setting | None = None  # what the operator gives it


def prepare_subject(
    invocation: Invocation, contract: Contract, call: Call | None, config: Any, secrets: Secrets | None
) -> TrialSubject:
    """Raises PluginError or PluginFailure: the manifest has a fault, or the call cannot succeed."""
    if invocation.command is not None:
        return TrialSubject(CageLaunch(invocation), None, call, Secrets())
    plugin = read_plugin(invocation)
    if contract.prepared_calls is None or call is None:
        launch = CageLaunch(invocation, secret_contents(contract, secrets))
        setting = Setting(plugin, config=config, secrets=secrets)
        return TrialSubject(launch, plugin, call, secrets or Secrets(), setting)
    prepared = complete_call(invocation, call, secrets=secrets, config=config)
    launch = CageLaunch(prepared.invocation, cage_contents(prepared))
    return TrialSubject(launch, prepared.plugin, prepared.call, prepared.secrets)


async def try_plugin(book: RuleBook, subject: TrialSubject, seconds: float) -> tuple[Verdict, ...]:
    """The verdict on each rule, in the order of the book. `seconds`: for each answer. Raises PluginFailure if
    the plugin cannot be launched."""
    trial = _Trial(book, subject, seconds)
    most = seconds * _ANSWERS_TOGETHER
    with trio.move_on_after(most):
        await trial.run()
    return trial.verdicts(f"it was not tried: the whole trial took more than {most:g} s")


def _given(book: RuleBook, setting: Setting) -> dict[str, Any]:
    """The facts about what the operator gives the plugin. Raises PluginFailure if that does not fit it."""
    try:
        return book.given(setting)
    except HandshakeFault as fault:
        found = fault.violation
        outcome = Outcome(found.code, "handshake", found.message, found.cause, found.hint)
        raise PluginFailure(outcome) from None


class _Trial:
    def __init__(self, book: RuleBook, subject: TrialSubject, seconds: float) -> None:
        self._book, self._launch, self._seconds = book, subject.launch, seconds
        self._has_manifest = subject.plugin is not None
        known = book.facts(subject.plugin, subject.call)
        if subject.setting is not None:
            known |= _given(book, subject.setting)
        self._facts = TrialFacts(known, book.make_id)
        self._facts.untold = encode(dict(subject.secrets)) if subject.secrets else b""
        self._verdicts: dict[str, Verdict] = {}  # by the rule's id
        self._faults: dict[Watch, tuple[str, tuple[TranscriptLine, ...]]] = {}
        self._messages = 0
        self._heard: set[Watch] = set()
        self._unready = ""  # why there is no handshake
        # The verdict on rules that need one. A handshake that worked before is no excuse.
        self._untried: Result = "n/a"

    async def run(self) -> None:
        rules = [each for each in self._book.rules if each.watch is None]
        waiting = deque(each for each in rules if not each.own)
        while waiting and not self._unready:
            async with self._conversation() as talk:
                if await self._is_ready(talk):
                    while waiting and await self._try(waiting.popleft(), talk):
                        pass
        for rule in (*waiting, *(each for each in rules if each.own)):
            if rule.after_handshake and self._unready:
                self._conclude(rule, self._untried, self._unready)
                continue
            passed = False
            async with self._conversation() as talk:
                if not rule.after_handshake or await self._is_ready(talk):
                    passed = await self._try(rule, talk)
                else:
                    self._conclude(rule, self._untried, self._unready)
            if passed and rule.again:
                async with self._conversation() as talk:
                    await self._try(rule._replace(steps=(*self._book.handshake, *rule.again)), talk)

    @asynccontextmanager
    async def _conversation(self) -> AsyncIterator[RawConversation]:
        async with converse(self._launch, self._book, self._facts, self._seconds) as talk:
            try:
                yield talk
            finally:
                self._messages += talk.count
                self._heard |= talk.heard
        for watch, fault in talk.faults.items():
            self._faults.setdefault(watch, fault)

    async def _is_ready(self, talk: RawConversation) -> bool:
        try:
            await talk.run(self._book.handshake)
        except RuleBroken as broken:
            self._unready = f"it comes after the handshake, which failed: {broken}"
        except MissingFact as missing:
            self._unready = self._why_missing(str(missing))
        else:
            self._untried = "fail"
        return not self._unready

    async def _try(self, rule: TriedRule, talk: RawConversation) -> bool:
        """Try a rule. Returns whether others can be tried in the same process."""
        began = trio.current_time()
        self._facts.forget_ids()
        talk.reply = rule.reply or self._book.reply
        if not rule.own:
            talk.transcript = Transcript()
        result: Result = "pass"
        reason = next((self._why_missing(each) for each in rule.needs if f"${each}" not in self._facts), "")
        if reason:
            self._conclude(rule, "n/a", reason)
            return True
        try:
            await talk.run(rule.steps)
        except RuleBroken as broken:
            result, reason = "fail", str(broken)
        except MissingFact as missing:
            result, reason = "n/a", self._why_missing(str(missing))
        self._conclude(rule, result, reason, talk.transcript.lines, trio.current_time() - began)
        return result != "fail"

    def _why_missing(self, fact: str) -> str:
        usual = f"{fact} is not known" if self._has_manifest else "a command has no manifest to compare with"
        return self._book.missing.get(fact, usual)

    def _conclude(
        self,
        rule: TriedRule,
        result: Result,
        reason: str,
        exchange: tuple[TranscriptLine, ...] = (),
        seconds: float = 0.0,
    ) -> None:
        self._verdicts[rule.rule.id] = Verdict(rule.rule, result, reason, exchange, seconds)

    def verdicts(self, untried: str) -> tuple[Verdict, ...]:
        """All of them. `untried`: the reason for a rule that was not tried."""
        for rule in self._book.rules:
            known = [f"${each}" in self._facts for each in rule.unless or ()]
            if known == [True, False]:
                self._conclude(rule, "n/a", self._book.excuse)
            if rule.watch in self._faults:
                self._conclude(rule, "fail", *self._faults[rule.watch])
            elif rule.watch is not None:
                own = rule.watch in self._book.watches
                heard = rule.watch in self._heard if own else bool(self._messages)
                reason = self._why_missing(rule.watch) if own else "it wrote no message"
                self._conclude(rule, "pass" if heard else "n/a", "" if heard else reason)
        return tuple(
            self._verdicts.get(rule.rule.id, Verdict(rule.rule, "fail", untried)) for rule in self._book.rules
        )
