"""Making a call, as the gateway needs it: with an answer in every case."""

from __future__ import annotations

from typing import Protocol

from runner.exceptions import PluginError, PluginFailure
from runner.lifecycle.exceptions import UnknownPlugin
from runner.lifecycle.supervisor import Supervisor
from runner.outcome import Outcome
from runner.protocol.calls import CallRequest
from runner.serve.desk import CallAnswer, failed


class Maker(Protocol):
    async def make(self, call: CallRequest) -> CallAnswer: ...


class SupervisedMaker:
    """Without a daemon: there is no ledger."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    async def make(self, call: CallRequest) -> CallAnswer:
        try:
            result = await self._supervisor.make(call)
        except PluginError as error:
            return failed(error.outcome, data=error.data)
        except PluginFailure as failure:
            return failed(failure.outcome)
        except UnknownPlugin as unknown:  # it was removed meanwhile
            return failed(Outcome("launch_failed", "call", str(unknown), "unknown_plugin"))
        return CallAnswer(200, {"value": result.value})
