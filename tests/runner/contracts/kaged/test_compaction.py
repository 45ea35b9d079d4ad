"""The compaction pipeline with fake plugins: order, parallelism, clocks, roles, failures."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
import trio
import trio.testing

from runner.contracts.kaged.compaction import (
    Compaction,
    Contribution,
    HookFailure,
    Member,
    TwoCompactors,
    compact,
)
from runner.contracts.kaged.declared import Declared, details_of
from runner.plugin import Plugin
from sandbox.spec import SandboxSpec

pytestmark = pytest.mark.trio

PRE, POST = "pre_compact", "post_compact"
BOTH = (PRE, POST)
PARAMS: dict[str, Any] = {
    "messages_being_compacted": "old",
    "messages_remaining": "new",
    "strategy": "summarize",
    "trigger": "token_limit",
}


class Log:
    """What happened, in order, with the time."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.calls: list[tuple[str, str, Any, Mapping[str, Any]]] = []
        self.began = trio.current_time()

    def say(self, text: str) -> None:
        self.lines.append(f"{trio.current_time() - self.began:g} {text}")


class FakePlugin:
    """Answers each hook with a value, or by calling a function of it."""

    def __init__(
        self,
        name: str,
        log: Log,
        answers: Mapping[str, Any] | None = None,
        *,
        hooks: Sequence[str] = BOTH,
        roles: Sequence[str] = ("observer",),
        seconds: float = 10.0,
    ) -> None:
        self.plugin = Plugin(
            id=name,
            version="1.0.0",
            contract="kaged",
            name=name,
            description="",
            manifest=f"/{name}/kaged-plugin.yaml",
            root=f"/{name}",
            entrypoint=None,
            spec=SandboxSpec(),
            details=details_of(Declared(hooks=tuple(hooks), roles=tuple(roles))),
            timeouts=(("hook", seconds),),
        )
        self.substituted = ""
        self._log = log
        self._answers = {PRE: None, POST: {"retain": []}, **(answers or {})}

    async def call(
        self,
        name: str,
        input: Any = None,  # noqa: A002 -- as OpenPlugin has it
        *,
        kind: str = "tool",
        seconds: float | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> Any:
        assert kind == "hook"
        self._log.say(f"{self.plugin.id} {name}")
        self._log.calls.append((self.plugin.id, name, input, context or {}))
        self.seconds, self.substituted = seconds, ""
        answer = self._answers[name]
        return await answer(self) if callable(answer) else answer


def after(seconds: float, answer: Any = None) -> Callable[[FakePlugin], Awaitable[Any]]:
    async def wait(member: FakePlugin) -> Any:
        await trio.sleep(seconds)
        return answer

    return wait


def failing(error: BaseException) -> Callable[[FakePlugin], Awaitable[Any]]:
    async def fail(member: FakePlugin) -> Any:
        raise error

    return fail


def substituted(why: str) -> Callable[[FakePlugin], Awaitable[Any]]:
    """As a session answers for a hook that failed."""

    async def answer(member: FakePlugin) -> Any:
        member.substituted = why
        return None

    return answer


async def run(
    log: Log, *members: Member, builtin: Any = "built in", context: Mapping[str, str] | None = None
) -> Compaction:
    async def strategy() -> Any:
        log.say("builtin")
        return await builtin() if callable(builtin) else builtin

    return await compact(members, **PARAMS, builtin=strategy, context=context)


# --- the order ----------------------------------------------------------------------------------------------


async def test_the_order(autojump_clock: trio.testing.MockClock) -> None:
    log = Log()
    observers = [
        FakePlugin(name, log, {PRE: after(2), POST: after(3, {"retain": []})}) for name in ("a", "b")
    ]
    compactor = FakePlugin("c", log, {PRE: after(1, {"summary": "short"})}, roles=("compactor",))
    done = await run(log, compactor, *observers)
    # Observers at the same time, then the compactor, then everybody at the same time.
    assert [sorted(log.lines[:2]), log.lines[2], sorted(log.lines[3:])] == [
        ["0 a pre_compact", "0 b pre_compact"],
        "2 c pre_compact",
        ["3 a post_compact", "3 b post_compact", "3 c post_compact"],
    ]
    assert trio.current_time() - log.began == 6
    assert done == Compaction({"summary": "short"}, "c", (), ())


async def test_without_a_compactor_the_built_in_strategy_is_used(
    autojump_clock: trio.testing.MockClock,
) -> None:
    log = Log()
    done = await run(log, FakePlugin("a", log))
    assert log.lines == ["0 a pre_compact", "0 builtin", "0 a post_compact"]
    assert (done.replacement, done.by) == ("built in", "")


async def test_without_plugins(autojump_clock: trio.testing.MockClock) -> None:
    log = Log()
    assert await run(log) == Compaction("built in", "")


async def test_each_stage_of_a_compaction_gets_its_params() -> None:
    log = Log()
    await run(
        log,
        FakePlugin("a", log, roles=("compactor",)),
        context={"operator_id": "ada", "agent_path": "ignored"},
    )
    context = {"operator_id": "ada", "agent_path": "primary"}
    assert log.calls == [("a", PRE, PARAMS, context), ("a", POST, PARAMS, context)]


async def test_the_agent_is_named() -> None:
    log = Log()

    async def builtin() -> None:
        pass

    path = "primary.subagents.scout"
    await compact([FakePlugin("a", log)], **PARAMS, builtin=builtin, agent_path=path)
    assert [call[3] for call in log.calls] == [{"agent_path": path}] * 2


@pytest.mark.parametrize(
    ("hooks", "roles", "sent"),
    [
        ((), (), []),
        (("on_session_start",), ("observer",), []),
        ((PRE,), ("observer",), [PRE]),
        ((POST,), ("observer",), [POST]),
        ((PRE,), ("compactor",), [PRE]),
        (BOTH, ("observer", "compactor"), [PRE, POST]),
        (BOTH, (), [PRE, POST]),
    ],
)
async def test_only_declared_hooks_are_sent(
    hooks: Sequence[str], roles: Sequence[str], sent: Sequence[str]
) -> None:
    log = Log()
    await run(log, FakePlugin("a", log, hooks=hooks, roles=roles))
    assert [call[1] for call in log.calls] == sent


async def test_two_compactors_are_refused_before_anything_is_called() -> None:
    log = Log()
    members = [FakePlugin(name, log, roles=("compactor",)) for name in ("first", "second")]
    with pytest.raises(TwoCompactors) as caught:
        await run(log, FakePlugin("a", log), *members)
    assert str(caught.value) == (
        "the plugins 'first' and 'second' both have the role compactor, and an agent has at most one: leave "
        "one of them out"
    )
    assert log.lines == []


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"agent_path": "bogus"}, "agent_path in the context has to be primary or primary.subagents.KEY"),
        ({"agent_path": 5}, "agent_path in the context is not a string"),
        ({"context": {"operator_id": 5}}, "operator_id in the context is not a string"),
        ({"context": {"foo": "x"}}, "the context has 'foo', which is not sent along with a hook; known are "),
        ({"strategy": 5}, "strategy is missing or not a string"),
    ],
)
async def test_a_mistake_of_the_caller_is_raised_before_anything_is_called(
    mistake: Mapping[str, Any], message: str
) -> None:
    log = Log()

    async def builtin() -> None:
        log.say("builtin")

    arguments: dict[str, Any] = {**PARAMS, **mistake}
    with pytest.raises(ValueError, match=re.escape(message)):
        await compact([FakePlugin("a", log)], builtin=builtin, **arguments)
    assert log.lines == []


@pytest.mark.parametrize("strategy", ["drop", "summarize", "delegate", "checkpoint", "of-tomorrow"])
async def test_every_word_for_a_strategy_passes(strategy: str) -> None:
    log = Log()

    async def builtin() -> None:
        pass

    params = {**PARAMS, "strategy": strategy}
    await compact([FakePlugin("a", log)], **params, builtin=builtin)
    assert [call[2]["strategy"] for call in log.calls] == [strategy] * 2


# --- what plugins add ---------------------------------------------------------------------------------------


async def test_contributions_are_in_the_order_of_the_members(autojump_clock: trio.testing.MockClock) -> None:
    log = Log()
    done = await run(
        log,
        FakePlugin("slow", log, {POST: after(5, {"retain": [1, {"x": 2}]})}),
        FakePlugin("silent", log, {POST: {"retain": [], "inject": ""}}),
        FakePlugin("quick", log, {POST: {"retain": [], "inject": "remember"}}),
        FakePlugin("none", log, {POST: None}),
    )
    assert done.contributions == (
        Contribution("slow", "", (1, {"x": 2})),
        Contribution("quick", "remember", ()),
    )
    assert done.failures == ()


async def test_an_observers_answer_to_pre_compact_is_ignored() -> None:
    log = Log()
    done = await run(log, FakePlugin("a", log, {PRE: {"summary": "mine"}}))
    assert (done.replacement, done.by, done.failures) == ("built in", "", ())


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ([], "its answer is not an object"),
        ({"retain": "x"}, "retain in its answer is not an array"),
        ({"retain": [], "inject": 1}, "inject in its answer is not a string"),
    ],
)
async def test_an_answer_of_the_wrong_shape_adds_nothing(answer: Any, why: str) -> None:
    log = Log()
    done = await run(log, FakePlugin("a", log, {POST: answer}), FakePlugin("b", log, {POST: {"inject": "b"}}))
    assert done.contributions == (Contribution("b", "b"),)
    assert done.failures == (HookFailure("a", POST, why),)


# --- failures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "it answered with no object, so the built-in strategy is used"),
        ([1], "it answered with no object, so the built-in strategy is used"),
        ("text", "it answered with no object, so the built-in strategy is used"),
        (failing(ValueError("it broke\n| with a traceback")), "it broke"),
        (failing(ValueError()), "ValueError"),
        (substituted("the plugin was killed"), "the plugin was killed"),
        (after(60), "there was no answer within 10 s (hook_timeout_sec in its manifest)"),
    ],
)
async def test_a_compactor_that_fails_is_replaced(
    autojump_clock: trio.testing.MockClock, answer: Any, why: str
) -> None:
    log = Log()
    done = await run(log, FakePlugin("c", log, {PRE: answer}, roles=("compactor",)))
    assert (done.replacement, done.by) == ("built in", "")
    assert done.failures == (HookFailure("c", PRE, why),)
    assert [line.split()[1:] for line in log.lines] == [["c", PRE], ["builtin"], ["c", POST]]


async def test_one_that_fails_stops_nobody(autojump_clock: trio.testing.MockClock) -> None:
    log = Log()
    broken = {PRE: failing(OSError("gone")), POST: substituted("crashed")}
    done = await run(
        log,
        FakePlugin("broken", log, broken),
        FakePlugin("slow", log, {PRE: after(60), POST: after(60)}, seconds=2),
        FakePlugin("good", log, {POST: {"retain": [1]}}),
        FakePlugin("c", log, {PRE: {"summary": "s"}}, roles=("compactor",)),
    )
    late = "there was no answer within 2 s (hook_timeout_sec in its manifest)"
    assert done == Compaction(
        {"summary": "s"},
        "c",
        (Contribution("good", "", (1,)),),
        (
            HookFailure("broken", PRE, "gone"),
            HookFailure("slow", PRE, late),
            HookFailure("broken", POST, "crashed"),
            HookFailure("slow", POST, late),
        ),
    )
    assert trio.current_time() - log.began == 2 * (2 + 1)  # each step: its time, and a second of grace


async def test_each_has_the_time_of_its_manifest() -> None:
    log = Log()
    members = [FakePlugin("a", log, seconds=3), FakePlugin("b", log, seconds=7, roles=("compactor",))]
    await run(log, *members)
    assert [member.seconds for member in members] == [3, 7]


async def test_a_failure_of_the_built_in_strategy_is_the_callers() -> None:
    log = Log()

    async def builtin() -> Any:
        raise RuntimeError("no model")

    with pytest.raises(RuntimeError, match="no model"):
        await run(log, FakePlugin("a", log), builtin=builtin)
    assert [call[1] for call in log.calls] == [PRE]


async def test_a_cancellation_passes_through(autojump_clock: trio.testing.MockClock) -> None:
    log = Log()
    for hook in BOTH:
        with trio.move_on_after(1) as scope:
            await run(log, FakePlugin("a", log, {hook: after(5)}), FakePlugin("b", log, {hook: after(5)}))
        assert scope.cancelled_caught
    with trio.move_on_after(1) as scope:
        await run(log, FakePlugin("c", log, {PRE: after(5)}, roles=("compactor",)))
    assert scope.cancelled_caught
