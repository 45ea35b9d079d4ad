"""One call. If there is no such tool, the message lists those that exist."""

from __future__ import annotations

import trio

from runner.cli.live.output import Output
from runner.cli.live.session import SessionRequest, run_session, write_in_thread
from runner.contracts.registry import find_contract
from runner.exceptions import InvalidCall, PluginError, PluginFailure
from runner.outcome import Outcome
from runner.protocol.dialect import Call
from runner.session import verdict
from runner.session.session import Session
from sandbox.document.diagnostic import did_you_mean, printable, quoted

# For the list of names in a hint.
_ADVICE_SECONDS = 5.0
_ADVICE_NAMES = 20


def call_once(request: SessionRequest, output: Output) -> int:
    statuses: list[int] = []  # the exit status, if the call runs a command

    async def work(session: Session) -> None:
        try:
            value = await session.call(
                request.call,
                seconds=request.seconds,
                deadline=session.deadline,
                on_progress=output.progress,
            )
        except InvalidCall as error:
            raise _with_schema_hint(error) from None
        except PluginError as error:
            raise await _with_names(session, request.call, error) from None
        except PluginFailure as error:
            if error.outcome.code == "timeout" and not session.is_over:
                # Before the shutdown, which takes a moment.
                output.failure(error, session.terms.notes)
            raise
        if session.is_one_shot:
            await session.conclude()  # before anything is printed: the way it ends may invalidate the answer
        contract = find_contract(session.terms.plugin.contract)
        command = None if output.as_json else contract.command_output(request.call, value)
        if command is None:
            await write_in_thread(output.result, value)
        else:
            await write_in_thread(output.command, command)
            statuses.append(command.status)

    status = run_session(request, output, f"{request.call.kind} {request.call.name}", work)
    return status or next(iter(statuses), 0)


def _with_schema_hint(error: PluginError) -> PluginError:
    if error.kind == "invalid_arguments":
        error.outcome = error.outcome._replace(
            hint="runner tools --json MANIFEST shows the input schema of each tool"
        )
    return error


async def _with_names(session: Session, call: Call, error: PluginError) -> PluginError | PluginFailure:
    """Add a hint that lists the existing names, if the error may mean that this one does not exist."""
    _with_schema_hint(error)
    lists = find_contract(session.terms.plugin.contract).lists
    listing = next((each for each in lists if each.kind == call.kind), None)
    if listing is None:
        return error  # the name was checked against handshake or manifest before the call
    try:
        found = await session.call(Call("list", listing.what), seconds=_ADVICE_SECONDS)
    except (PluginError, PluginFailure):
        return error
    names = [printable(str(entry.get(listing.key, ""))) for entry in found]
    if call.name in names:
        return error
    shown = ", ".join(map(quoted, names[:_ADVICE_NAMES])) + (", …" if len(names) > _ADVICE_NAMES else "")
    hint = did_you_mean(call.name, names) or (
        f"there are {shown}" if names else f"it has no {listing.what} at all"
    )
    if not listing.complete:
        error.outcome = error.outcome._replace(hint=hint)
        return error
    message = f"the plugin has no {call.kind} {quoted(call.name)}: {error.message}"
    return PluginFailure(Outcome("tool_not_exposed", "call", message, call.kind, hint))


# --- an event -----------------------------------------------------------------------------------------------


# How long published events are printed without --timeout.
SECONDS = 5.0


def send_event(request: SessionRequest, output: Output) -> int:
    """The plugin may publish any number of events. They are printed as they come, until the time is up."""
    output.shows_published = True

    async def work(session: Session) -> None:
        seconds = SECONDS if request.seconds is None else request.seconds
        granted = session.terms.limits.call
        seconds = seconds if granted is None else min(granted, seconds)
        method = session.state.dialect.event_method
        queued = session.notify(method, {"topic": request.call.name, "payload": request.call.input})
        with trio.move_on_after(seconds):
            await session.ended()
        if not all(frame.written for frame in queued):
            raise PluginFailure(verdict.stalled("call", seconds))

    return run_session(request, output, f"event {request.call.name}", work)
