"""Making a call, as the gateway needs it: with an outcome in every case."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from runner.exceptions import PluginError, PluginFailure
from runner.lifecycle.exceptions import UnknownPlugin
from runner.lifecycle.supervisor import Supervisor
from runner.outcome import Outcome
from runner.protocol.calls import CallRequest
from runner.serve.refusal import outcome_error
from sandbox.speed.value import NamedTuple


class Made(NamedTuple):
    """The value, or an error with code, phase, cause, message and hint."""

    value: Any = None
    error: Mapping[str, Any] | None = None
    data: Any = None  # of the plugin's own error


class Maker(Protocol):
    async def make(self, call: CallRequest) -> Made: ...


class SupervisedMaker:
    """Without a daemon: there is no ledger."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    async def make(self, call: CallRequest) -> Made:
        try:
            result = await self._supervisor.make(call)
        except PluginError as error:
            return failed(error.outcome, error.data)
        except PluginFailure as failure:
            return failed(failure.outcome)
        except UnknownPlugin as unknown:  # it was removed meanwhile
            return failed(Outcome("launch_failed", "call", str(unknown), "unknown_plugin"))
        return Made(result.value)


def failed(outcome: Outcome, data: Any = None) -> Made:
    return Made(None, outcome_error(outcome)["error"], data)
