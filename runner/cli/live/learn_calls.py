"""The calls of `runner learn --call`: one session, one call after the other, whatever they answer."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from runner.cli.live.session import cancelled_by_signals, run_on_trio
from runner.cli.shared.text import say
from runner.exceptions import PluginError, PluginFailure
from runner.launch.stages import Invocation
from runner.learn.proposal import shown
from runner.outcome import EXIT
from runner.protocol.dialect import Call
from runner.protocol.secrets import Secrets
from runner.session.open import open_session
from runner.session.session import Session
from sandbox.cell.contents import Contents
from sandbox.document.diagnostic import printable

_STDERR_LINES = 5  # that are shown of a plugin that failed
_MOST_OUTPUT = 64 << 10  # characters of each answer that are searched for names


class HeardCalls(NamedTuple):
    report: dict[str, Any] | None  # None: the plugin was not started
    output: str  # its stderr and its answers
    status: int  # the exit status if there is no report


def talk(
    invocation: Invocation,
    kind: str,
    calls: Sequence[tuple[str, Any]],
    config: Any,
    secrets: Secrets | None,
    contents: Contents | None,
) -> HeardCalls:
    return run_on_trio(_talk, invocation, kind, calls, config, secrets, contents)


async def _talk(
    invocation: Invocation,
    kind: str,
    calls: Sequence[tuple[str, Any]],
    config: Any,
    secrets: Secrets | None,
    contents: Contents | None,
) -> HeardCalls:
    made: list[Session] = []
    said: list[str] = []
    failed: PluginFailure | None = None

    def on_signal(_: int, first: bool) -> None:
        if not first:
            for session in made:
                session.kill()

    async with cancelled_by_signals(on_signal):
        try:
            async with open_session(
                invocation,
                environ=os.environ,
                config=config,
                secrets=secrets,
                contents=contents,
                on_made=made.append,
            ) as session:
                for name, given in calls:
                    await _call(session, Call(kind, name, given), said)
        except* PluginFailure as group:
            failed = next(each for each in group.exceptions if isinstance(each, PluginFailure))
            say(f"runner learn: {failed.outcome.code}: {printable(failed.outcome.message)}")
            if failed.outcome.hint:
                say(f"  {printable(failed.outcome.hint)}")
            for line in (made[0].stderr if made else "").splitlines()[-_STDERR_LINES:]:
                say(f"  | {printable(line)}")
    found = (made[0].report if made else None) or (None if failed is None else failed.report)
    output = "\n".join((made[0].stderr if made else "", *said))
    return HeardCalls(found, output, EXIT["ok" if failed is None else failed.outcome.code])


async def _call(session: Session, call: Call, said: list[str]) -> None:
    what = f"runner learn: call {shown(call.name)}"
    try:
        value = await session.call(call)
    except PluginError as error:
        said.append(error.message[:_MOST_OUTPUT])
        say(f"{what}: it answered with an error: {printable(error.message[:300])}")
    else:
        said.append(json.dumps(value, ensure_ascii=False)[:_MOST_OUTPUT])
        say(f"{what}: it answered")
