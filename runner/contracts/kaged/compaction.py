"""Compaction: an agent's older messages are replaced by something shorter, and its plugins take part.

    1  pre_compact    to all observers, at the same time
    2  pre_compact    to the one compactor, whose object takes the place of the messages
       or builtin     if there is no compactor, or it failed, was late or gave no object
    3  post_compact   to all that have the hook, at the same time; their `retain` and `inject` are collected

A plugin gets only the hooks of its manifest. One that fails contributes nothing and stops nobody.

    async with runner.open_plugin("memory") as memory:
        done = await compact([memory], messages_being_compacted=old, messages_remaining=new,
                             strategy="summarize", trigger="token_limit", builtin=summarize)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import trio

from runner.contracts.kaged import CONTEXT
from runner.contracts.kaged.calls import PRIMARY, context_fault
from runner.contracts.kaged.declared import COMPACTOR, declared_by
from runner.contracts.kaged.hooks import POST_COMPACT, PRE_COMPACT, params_fault
from runner.plugin import Plugin
from runner.protocol.dialect import Call, Kind, stray_context
from sandbox.document.diagnostic import quoted

_HOOK_SECONDS = 10.0  # where the manifest's number is not known
# The member has its own time limit. This is the extra time before we stop waiting for it.
_GRACE_SECONDS = 1.0


class Member(Protocol):
    """A plugin of the agent: runner.OpenPlugin is one."""

    @property
    def plugin(self) -> Plugin: ...

    @property
    def substituted(self) -> str:
        """Reason why the last answer was a substitute, or ''."""
        ...

    async def call(
        self,
        name: str,
        input: Any = None,  # noqa: A002 -- as OpenPlugin has it
        *,
        kind: Kind = "tool",
        seconds: float | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> Any: ...


class Contribution(NamedTuple):
    """What one plugin adds to the agent's context after the compaction."""

    plugin: str
    inject: str = ""
    retain: tuple[Any, ...] = ()


class HookFailure(NamedTuple):
    plugin: str
    hook: str
    why: str


class Compaction(NamedTuple):
    replacement: Any  # what takes the place of the messages
    by: str  # the plugin that made it; empty: the built-in strategy
    contributions: tuple[Contribution, ...] = ()  # in the order of the members
    failures: tuple[HookFailure, ...] = ()  # in the order of the steps, then of the members


class TwoCompactors(ValueError):
    """An agent has at most one compactor. Nothing was called."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(
            f"the plugins {quoted(first)} and {quoted(second)} both have the role {COMPACTOR}, and an agent "
            "has at most one: leave one of them out"
        )


async def compact(
    members: Sequence[Member],
    *,
    messages_being_compacted: str,
    messages_remaining: str,
    strategy: str,
    trigger: str,
    builtin: Callable[[], Awaitable[Any]],
    agent_path: str = PRIMARY,
    context: Mapping[str, str] | None = None,
) -> Compaction:
    """Compact the messages of one agent.

    `members`: its plugins. `strategy`: drop, summarize, delegate, checkpoint, or any other word; plugins get
    it as it is. `trigger`: why it is done, such as token_limit. `builtin`: the host's own strategy. What it
    raises ends the compaction. `context`: more keys of the calls' context, such as operator_id.

    Raises TwoCompactors, and ValueError if one of the arguments is wrong; nothing was called then. A failure
    of a plugin is in the result.
    """
    compactor = find_compactor([member.plugin for member in members])
    params = {
        "messages_being_compacted": messages_being_compacted,
        "messages_remaining": messages_remaining,
        "strategy": strategy,
        "trigger": trigger,
    }
    asking = _HookCalls(params, {**(context or {}), "agent_path": agent_path})
    asking.require_valid()
    observers = [member for place, member in enumerate(members) if place != compactor]
    await asking.ask_all(PRE_COMPACT, observers)

    replacement, by = None, ""
    if compactor is not None:
        replacement = await asking.ask_compactor(members[compactor])
        by = members[compactor].plugin.id if replacement is not None else ""
    if replacement is None:
        replacement = await builtin()

    answers = await asking.ask_all(POST_COMPACT, members)
    contributions = [
        contribution
        for member, answer in zip(members, answers, strict=True)
        if (contribution := asking.read_contribution(member, answer)) is not None
    ]
    return Compaction(replacement, by, tuple(contributions), tuple(asking.failures))


def find_compactor(plugins: Sequence[Plugin]) -> int | None:
    """The place of the compactor among the plugins of one agent. Raises TwoCompactors."""
    found = [place for place, plugin in enumerate(plugins) if COMPACTOR in declared_by(plugin).roles]
    if len(found) > 1:
        raise TwoCompactors(plugins[found[0]].id, plugins[found[1]].id)
    return found[0] if found else None


_NOTHING = object()  # there is no answer: it was not asked, or it failed


class _HookCalls:
    """The hooks of one compaction, and what failed."""

    def __init__(self, params: Mapping[str, str], context: Mapping[str, str]) -> None:
        self._params = params
        self._context = context
        self.failures: list[HookFailure] = []

    def require_valid(self) -> None:
        """Raise ValueError for a mistake of the caller. Otherwise it would look like a failure of each
        plugin."""
        fault = (
            params_fault(POST_COMPACT, self._params)
            or stray_context(Call("hook", POST_COMPACT, None, self._context), {"hook": CONTEXT})
            or context_fault(self._context)
        )
        if fault:
            raise ValueError(fault)

    async def ask_all(self, hook: str, members: Sequence[Member]) -> list[Any]:
        """The answers of those that have the hook. It takes as long as the slowest of them."""
        answers: list[Any] = [_NOTHING] * len(members)
        faults: list[str] = [""] * len(members)

        async def ask(place: int, member: Member) -> None:
            answers[place], faults[place] = await self._ask(hook, member)

        async with trio.open_nursery() as nursery:
            for place, member in enumerate(members):
                nursery.start_soon(ask, place, member)
        for member, why in zip(members, faults, strict=True):
            self._note(member, hook, why)
        return answers

    async def ask_compactor(self, member: Member) -> Mapping[str, Any] | None:
        """The compactor's replacement for the messages; None if its answer is not an object."""
        answer, why = await self._ask(PRE_COMPACT, member)
        if answer is not _NOTHING and not isinstance(answer, Mapping):
            why = "it answered with no object, so the built-in strategy is used"
        self._note(member, PRE_COMPACT, why)
        return answer if isinstance(answer, Mapping) else None

    def read_contribution(self, member: Member, answer: Any) -> Contribution | None:
        """None: it adds nothing."""
        if answer is _NOTHING or answer is None:
            return None
        fault = _contribution_fault(answer)
        self._note(member, POST_COMPACT, fault)
        if fault or not (answer.get("inject") or answer.get("retain")):
            return None
        return Contribution(member.plugin.id, answer.get("inject") or "", tuple(answer.get("retain") or ()))

    async def _ask(self, hook: str, member: Member) -> tuple[Any, str]:
        """The answer, or _NOTHING and the reason. A cancellation passes through."""
        if hook not in declared_by(member.plugin).hooks:
            return _NOTHING, ""
        seconds = dict(member.plugin.timeouts).get("hook", _HOOK_SECONDS)
        try:
            with trio.fail_after(seconds + _GRACE_SECONDS):
                answer = await member.call(
                    hook, dict(self._params), kind="hook", seconds=seconds, context=dict(self._context)
                )
                why = member.substituted  # read before another task calls the plugin
        except trio.TooSlowError:
            return _NOTHING, f"there was no answer within {seconds:g} s (hook_timeout_sec in its manifest)"
        except Exception as error:  # noqa: BLE001 -- of the plugin or its session; the others go on
            return _NOTHING, (str(error) or type(error).__name__).splitlines()[0]
        return (_NOTHING, why) if why else (answer, "")

    def _note(self, member: Member, hook: str, why: str) -> None:
        if why:
            self.failures.append(HookFailure(member.plugin.id, hook, why))


def _contribution_fault(answer: Any) -> str:
    if not isinstance(answer, Mapping):
        return "its answer is not an object"
    if not isinstance(answer.get("retain", []), list):
        return "retain in its answer is not an array"
    if not isinstance(answer.get("inject", ""), str):
        return "inject in its answer is not a string"
    return ""
