"""A plugin's side of the services: what it asks, and what it is told. There is no process behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import trio

from runner.contracts.ainb.declared import Declared, exports_of
from runner.contracts.ainb.host.services import AinbMethods, provide
from runner.contracts.ainb.payload import decode, encode
from runner.plugin import Allowance, Plugin
from runner.protocol.bus import SnapshotBus
from runner.protocol.dialect import Answer, Call, HostCall, Notice
from runner.protocol.host_services import HostError, Services
from runner.protocol.service_guard import ServiceGuard
from sandbox.spec import SandboxSpec

EVERYTHING = ("*",)


async def emit(value: Any) -> None:
    raise AssertionError("nothing comes in parts")


def make_plugin(name: str, declared: Declared) -> Plugin:
    return Plugin(
        id=name,
        version="1.0.0",
        contract="ainb",
        name=name,
        description="",
        manifest=f"/{name}/manifest.toml",
        root=f"/{name}",
        entrypoint=None,
        spec=SandboxSpec(),
        exports=exports_of(declared),
        details=declared._asdict(),
        capabilities=declared.granted,
    )


class Desk:
    """As a session connects them: the guard, the contract's methods, and the services."""

    def __init__(
        self,
        bus: SnapshotBus | None = None,
        name: str = "notes",
        declared: Declared | None = None,
        *,
        allowed: Sequence[str] = EVERYTHING,
        allowance: Allowance | None = None,
        services: Services | None = None,
        attached: bool = True,
    ) -> None:
        declared = declared if declared is not None else Declared(granted=("event_bus",))
        plugin = make_plugin(name, declared)
        self.services = provide(plugin, (services or Services())._replace(bus=bus), allowance or Allowance())
        self.methods = AinbMethods(plugin, allowance or Allowance())
        self.guard = ServiceGuard(self.methods, self.services, allowed, plugin)
        self.told: list[tuple[str, bytes]] = []  # topic and payload of each event
        self.notices: list[Notice] = []
        self.asked: list[Call] = []
        self.answers: Mapping[str, Any] = {}  # to calls, by name
        if attached:
            self.guard.attach(self._tell, trio.lowlevel.checkpoint, self._ask)

    def _tell(self, method: str, params: Any) -> None:
        assert method == "plugin/handle_event" and set(params) == {"topic", "payload"}
        self.told.append((params["topic"], decode(params["payload"])))

    async def _ask(self, call: Call) -> Any:
        self.asked.append(call)
        answer = self.answers[call.name]
        if isinstance(answer, HostError):
            raise answer
        return {"payload": answer}

    async def ask(self, method: str, params: Any) -> Answer:
        call = HostCall(1, method, params)
        assert self.guard.take(call) is None
        return await self.guard.answer(call, emit)

    async def result(self, method: str, params: Any) -> Any:
        answer = await self.ask(method, params)
        assert answer.error is None, answer.error
        return answer.result

    async def error(self, method: str, params: Any) -> tuple[int, str, Any]:
        answer = await self.ask(method, params)
        assert answer.error is not None, answer.result
        return answer.error

    def note(self, method: str, params: Any) -> list[Notice]:
        """Send a notification. Returns what the host is told because of it."""
        found = self.guard.take(HostCall(1, method, params, expects_answer=False))
        assert found is not None
        self.notices += found
        return list(found)

    def publish(self, topic: str, payload: bytes) -> list[Notice]:
        return self.note("host/snapshot/publish", {"topic": topic, "payload": encode(payload)})
