"""A program that uses the library asks its person before calls that `runner allow --confirm` names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import trio

from runner.approvals.confirmations import (
    DESTRUCTIVE,
    ConfirmationRecord,
    argument_lines,
    needs_confirmation,
)
from runner.approvals.record import ApprovalsUnusable
from runner.approvals.tools import identity_of
from runner.exceptions import PluginFailure
from runner.outcome import Outcome
from runner.plugin import Plugin
from runner.protocol.calls import CallConfirmation, CallRequest, Confirm

_HINT = "the program that makes the call has to say yes"


async def require_yes(
    confirm: Confirm,
    plugin: Plugin,
    request: CallRequest,
    environ: Mapping[str, str],
    list_tools: Callable[[], Awaitable[Sequence[Mapping[str, Any]]]],
) -> None:
    """Raises PluginFailure. `environ`: says where the person's approvals are."""
    try:
        record = ConfirmationRecord(environ)
        patterns = (await trio.to_thread.run_sync(record.read, identity_of(plugin))).patterns
    except ApprovalsUnusable as unusable:
        raise _refusal(str(unusable), unusable.hint) from None
    annotations = None
    if DESTRUCTIVE in patterns:
        listed = [each for each in await list_tools() if each.get("name") == request.tool]
        annotations = listed[0].get("annotations") if listed else None
    if not needs_confirmation(patterns, request.tool, annotations):
        return
    confirmation = CallConfirmation(plugin.id, request.tool, argument_lines(request.input), request.input)
    if await trio.to_thread.run_sync(confirm, confirmation) is not True:
        raise _refusal("nobody allowed this call", _HINT)


def _refusal(message: str, hint: str) -> PluginFailure:
    return PluginFailure(Outcome("policy_denied", "call", message, "not_confirmed", hint))
