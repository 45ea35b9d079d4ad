"""One call, and advice for who asked for something that is not there."""

from __future__ import annotations

from runner.cli.live.output import Output
from runner.cli.live.session import Request, converse, written
from runner.contracts.registry import find_contract
from runner.exceptions import InvalidCall, PluginError, PluginFailure
from runner.outcome import Outcome
from runner.protocol.dialect import Call
from runner.session.session import Session
from sandbox.document.diagnostic import did_you_mean, printable, quoted

# For a list of names that is only meant to help.
_ADVICE_SECONDS = 5.0
_ADVICE_NAMES = 20


def call_once(request: Request, output: Output) -> int:
    async def work(session: Session) -> None:
        try:
            value = await session.call(request.call, seconds=request.seconds, on_progress=output.progress)
        except InvalidCall as error:
            raise _advised_of_input(error) from None
        except PluginError as error:
            raise await _advised(session, request.call, error) from None
        except PluginFailure as error:
            if error.outcome.code == "timeout" and not session.is_over:
                error.stderr = session.stderr
                # Before the farewell, which takes a moment.
                output.failure(error, session.prepared.notes)
            raise
        if session.is_one_shot:
            await session.conclude()  # before anything is printed: it may take the answer back
        await written(output.result, value)

    return converse(request, output, f"{request.call.kind} {request.call.name}", work)


def _advised_of_input(error: PluginError) -> PluginError:
    if error.kind == "invalid_arguments":
        error.outcome = error.outcome._replace(hint="runner tools --json shows what it takes")
    return error


async def _advised(session: Session, call: Call, error: PluginError) -> PluginError | PluginFailure:
    """A "no" may mean that there is no such thing: then say what there is. Or that its input is wrong."""
    _advised_of_input(error)
    lists = find_contract(session.prepared.plugin.contract).lists
    listing = next((each for each in lists if each.kind == call.kind), None)
    if listing is None:
        return error  # its handshake or manifest had said what there is
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
