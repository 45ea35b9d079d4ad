"""Send one event to a plugin, and print the events it publishes in return."""

from __future__ import annotations

import trio

from runner.cli.live.output import Output
from runner.cli.live.session import SessionRequest, run_session
from runner.contracts.registry import find_contract
from runner.exceptions import PluginFailure
from runner.session import verdict
from runner.session.session import Session

# How long published events are printed without --timeout.
SECONDS = 5.0


def send_event(request: SessionRequest, output: Output) -> int:
    """The plugin may publish any number of events. They are printed as they come, until the time is up."""
    output.shows_published = True

    async def work(session: Session) -> None:
        seconds = SECONDS if request.seconds is None else request.seconds
        granted = session.terms.limits.call
        seconds = seconds if granted is None else min(granted, seconds)
        letters = session.notify(*find_contract(session.terms.plugin.contract).event(request.call))
        with trio.move_on_after(seconds):
            await session.ended()
        if not all(letter.written for letter in letters):
            raise PluginFailure(verdict.stalled(seconds))

    return run_session(request, output, f"event {request.call.name}", work)
