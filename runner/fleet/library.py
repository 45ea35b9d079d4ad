"""A fleet for programs on trio. Those on asyncio use runner/fleet/client.py.

async with runner.fleet.library.open_fleet("nats://127.0.0.1:4222") as fleet:
    print((await fleet.call("notes", "notes_add", {"text": "milk"}, durable=True)).value)
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, get_args

import trio

from runner.event_loop import require_trio
from runner.exceptions import InvalidCall, PluginError, PluginFailure
from runner.fleet.client import FleetClient, FleetPlugin, new_call, open_client
from runner.fleet.connection import FleetAddress, NoFleet, read_address
from runner.fleet.crossing import AsyncioThread, open_asyncio_thread
from runner.lifecycle.exceptions import Overloaded, UnknownPlugin
from runner.outcome import EXIT, Code, Outcome, Phase
from runner.protocol.calls import CallRequest, CallResult, OnProgress
from runner.protocol.dialect import Identity, Refusal
from runner.serve.desk import CallAnswer
from runner.serve.refusal import Refused

_REFUSALS: Mapping[str, Code] = {
    "overloaded": "overloaded",
    "quarantined": "quarantined",
    "policy_denied": "policy_denied",
    "clock_behind": "launch_failed",  # nothing is wrong with the call
}


class FleetFailure(PluginFailure):
    """`also`: what the answer has beside the outcome, such as execution_outcome."""

    def __init__(self, outcome: Outcome, also: Mapping[str, Any] | None = None) -> None:
        super().__init__(outcome)
        self.also = dict(also or {})

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.outcome, self.also), self.__dict__


class Fleet:
    """Made by `open_fleet`."""

    def __init__(self, thread: AsyncioThread, client: FleetClient) -> None:
        self.thread, self.client = thread, client

    async def plugins(self) -> list[FleetPlugin]:
        """Raises NoFleet."""
        return await self.thread.run(self.client.plugins)

    async def call(
        self,
        plugin: str,
        tool: str,
        input: Any = None,  # noqa: A002 -- what it is called everywhere else
        *,
        kind: str | None = None,
        seconds: float | None = None,
        context: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
        durable: bool = False,
        call: str | None = None,
        retry: bool = True,
    ) -> CallResult:
        """Call a plugin of the fleet. `durable`: the call survives workers and servers; `call`: its id, with
        which it is made once. Raises PluginError, PluginFailure, Overloaded and UnknownPlugin, as a
        supervisor does, and what `on_progress` raises."""
        request = CallRequest(plugin, tool, input, kind, seconds, context, on_progress)
        return await self.make(request, durable=durable, call=call, retry=retry)

    async def make(
        self, request: CallRequest, *, durable: bool = False, call: str | None = None, retry: bool = True
    ) -> CallResult:
        """`call`, with its arguments in one value."""
        token, scope = trio.lowlevel.current_trio_token(), trio.CancelScope()
        faults: list[Exception] = []

        def tell_here(value: Mapping[str, Any]) -> None:
            try:
                if request.on_progress is not None and not faults:
                    request.on_progress(value)
            except Exception as error:  # noqa: BLE001 -- raised to the caller, whose function it is
                faults.append(error)
                scope.cancel()

        def tell(value: Mapping[str, Any]) -> None:  # on asyncio
            token.run_sync_soon(tell_here, value)

        async def make() -> CallAnswer:
            found = await self.client.find(request.plugin)
            made = new_call(request._replace(plugin=found.name), call=call, retry=retry)
            return await self.client.call(found, made, durable=durable, on_progress=tell)

        try:
            with scope:
                answer = await self.thread.run(make)
        except Refused as refused:
            raise _refusal(request.plugin, refused) from None
        except NoFleet as lost:
            hint = "are the fleet's servers up?"
            raise PluginFailure(Outcome("launch_failed", "call", str(lost), "no_fleet", hint)) from None
        if faults:
            raise faults[0]
        return result_of(answer)


def _refusal(plugin: str, refused: Refused) -> Exception:
    if refused.code == "unknown_plugin":
        return UnknownPlugin(plugin)
    code = _REFUSALS.get(refused.code, "invalid_call")
    outcome = Outcome(code, "call", refused.message, refused.code, refused.hint)
    if code == "overloaded":
        return Overloaded(outcome, refused.retry_after or 1.0)
    return PluginFailure(outcome)


def result_of(answer: CallAnswer) -> CallResult:
    """The value of an answer. Raises the exception that the worker made the answer from."""
    document = answer.document
    if answer.is_ok:
        return CallResult(document.get("value"), Identity("", ""), {}, "", document.get("invocation"))
    error = document.get("error", {})
    given, message, cause, hint = (str(error.get(key, "")) for key in ("code", "message", "cause", "hint"))
    code: Code = next((known for known in EXIT if known == given), "internal")
    phase: Phase = next((known for known in get_args(Phase) if known == error.get("phase")), "call")
    outcome = Outcome(code, phase, message, cause, hint)
    failure: PluginError | PluginFailure
    if code in ("plugin_error", "invalid_call"):
        kind = PluginError if code == "plugin_error" else InvalidCall
        failure = kind(Refusal(0, outcome.cause, outcome.message, "", document.get("data")))
        failure.outcome = outcome
    elif code == "overloaded":
        after = answer.headers.get("Retry-After", "1")
        failure = Overloaded(outcome, float(after) if re.fullmatch("[0-9]{1,6}", after) else 1.0)
    else:
        known = ("error", "id", "invocation", "data")
        failure = FleetFailure(outcome, {key: value for key, value in document.items() if key not in known})
    failure.invocation = document.get("invocation")
    raise failure


@asynccontextmanager
async def open_fleet(
    where: str | FleetAddress, *, say: Callable[[str], None] = lambda text: None
) -> AsyncIterator[Fleet]:
    """`where`: a URL, or a file with servers, user and keys. Raises NoFleet, ValueError and NotOnTrio."""
    require_trio()
    address = read_address(where) if isinstance(where, str) else where
    async with open_asyncio_thread() as thread:
        opening = open_client(address, say=say, stays=True)
        client = await thread.run(opening.__aenter__)
        try:
            yield Fleet(thread, client)
        finally:
            with trio.CancelScope(shield=True):
                await thread.run(_close, opening)


async def _close(opening: Any) -> None:
    await asyncio.wait_for(opening.__aexit__(None, None, None), 10)
