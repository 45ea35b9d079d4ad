"""The guard between a plugin's requests to its host and the services that answer them: host_services.py."""

from __future__ import annotations

import fnmatch
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext

import trio

from runner.plugin import Plugin
from runner.protocol.bus import Room
from runner.protocol.dialect import Answer, HostCall, Notice
from runner.protocol.host_services import (
    Ask,
    ConnectedMethods,
    Emit,
    Granted,
    HostError,
    HostMethods,
    LiveMethods,
    LongMethods,
    NotedMethods,
    Services,
    Tell,
    Why,
    granting,
)

# Requests of one plugin that are served at the same time, and that may wait for their turn. Any further
# request is refused as busy, not queued: the plugin's answers to us come through the same pipe as its
# requests.
CONCURRENT = 32
WAITING = 256


class ServiceGuard:
    """Lets the requests of one plugin through to the services, or refuses them."""

    def __init__(
        self,
        contract: HostMethods,
        services: Services,
        allowed: Sequence[str],
        plugin: Plugin | None = None,
    ) -> None:
        """`plugin`: what services find as `Granted.current().plugin`."""
        self._contract = contract
        self._granted = None if plugin is None else Granted(plugin)
        self._services = services
        self._allowed = tuple(allowed)
        self._turns = trio.Semaphore(CONCURRENT)
        self._open = 0
        self._attached: LiveMethods | None = None
        self._lanes: dict[str, trio.Semaphore] = {}  # for long answers
        self.served: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.busy: dict[str, int] = {}  # refused because too many were open or took too much memory

    @property
    def offered(self) -> frozenset[str]:
        """The services that the host has and the policy allows."""
        known = self._contract.METHODS.items()
        return frozenset(name for method, name in known if self.allows(method)) & self._services.offered

    def allows(self, method: str) -> bool:
        return any(fnmatch.fnmatchcase(method, pattern) for pattern in self._allowed)

    def attach(self, tell: Tell, room: Room, ask: Ask | None = None) -> None:
        if ask is not None and isinstance(self._contract, ConnectedMethods):
            self._contract.connect(self._services, self.allows, ask)
        if isinstance(self._contract, LiveMethods):
            self._attached = self._contract
            self._attached.attach(tell, room)

    async def published(self) -> None:
        """Wait until those who get what the plugin published have room for more."""
        if self._attached is not None:
            await self._attached.published()

    def detach(self) -> None:
        """May be called more than once."""
        attached, self._attached = self._attached, None
        if attached is not None:
            attached.detach()

    async def answer(self, call: HostCall, emit: Emit) -> Answer:
        """Serve or refuse a request. Never raises because of the plugin or a service; a cancellation passes
        through."""
        why = self._why_not(call)
        return await self._serve(call, emit) if why is None else self._refuse(call, why)

    @asynccontextmanager
    async def answered(
        self, call: HostCall, emit: Emit, is_wanted: Callable[[], bool] = lambda: True
    ) -> AsyncIterator[Answer]:
        """Like `answer`, as a context that lasts until the answer has been posted. Only a few long answers
        are made at a time, because each is held until the plugin has read those before. `is_wanted`: whether
        the plugin still gets answers."""
        contract = self._contract
        lane = contract.LONG.get(call.method) if isinstance(contract, LongMethods) else None
        if lane is None or self._why_not(call) is not None:
            yield await self.answer(call, emit)
            return
        name, most = lane
        self._open += 1
        try:
            async with self._lanes.setdefault(name, trio.Semaphore(most)):
                yield await self._serve(call, emit) if is_wanted() else self._refuse(call, "busy")
        finally:
            self._open -= 1

    async def _serve(self, call: HostCall, emit: Emit) -> Answer:
        self.served[call.method] = self.served.get(call.method, 0) + 1
        self._open += 1
        known = self._granted
        try:
            async with self._turns:
                with nullcontext() if known is None else granting(known._replace(method=call.method)):
                    return Answer(await self._contract.serve(call.method, call.params, self._services, emit))
        except HostError as error:
            return Answer(error=(error.code, str(error), error.data))
        except trio.Cancelled:
            raise
        except Exception as error:  # noqa: BLE001 -- a bug of the service; the plugin gets an answer
            return Answer(error=(-32603, f"internal error: {type(error).__name__}", None))
        except BaseExceptionGroup as group:
            # The call was cancelled, and the service failed while ending. No caller waits for that error,
            # and it must not end the session.
            cancelled, failed = group.split(trio.Cancelled)
            if cancelled is None or not isinstance(failed, Exception | None):
                raise
            raise cancelled from None
        finally:
            self._open -= 1

    def take(self, call: HostCall) -> Sequence[Notice] | None:
        """Serve a notification at once. Returns notices for the host; None: `answer` has to serve it.

        It is served when this returns, so it is never refused as busy.
        """
        contract = self._contract
        if call.expects_answer or not isinstance(contract, NotedMethods):
            return None
        why = self._why_not(call)
        if why is not None and why != "busy":
            self._refuse(call, why)
            return contract.ignored(call.method, why)
        try:
            told = contract.note(call.method, call.params, self._services)
            self.served[call.method] = self.served.get(call.method, 0) + 1
            return told
        except HostError as error:
            self._refuse(call, "denied")
            return contract.ignored(call.method, "denied", str(error))
        except Exception as error:  # noqa: BLE001 -- a bug of the service, which must not end the session
            return [
                Notice("dropped", {"method": call.method, "reason": f"{type(error).__name__} in the host"})
            ]

    def turn_away(self, call: HostCall) -> Answer:
        """The answer to a request for which there is no memory."""
        return self._refuse(call, self._why_not(call) or "busy")

    def _refuse(self, call: HostCall, why: Why) -> Answer:
        # Unknown methods are counted together: a plugin can invent any number of names.
        name = call.method if call.method in self._contract.METHODS else "unknown"
        self.refused[name] = self.refused.get(name, 0) + 1
        if why == "busy":
            self.busy[name] = self.busy.get(name, 0) + 1
        return self._contract.refused(call.method, why)

    def _why_not(self, call: HostCall) -> Why | None:
        service = self._contract.METHODS.get(call.method)
        if service is None:
            return "unknown"
        allowed = self.allows(call.method)
        absent = bool(service) and getattr(self._services, service) is None
        if absent and (allowed or call.expects_answer):
            return "absent"
        if not allowed:
            return "denied"
        return "busy" if self._open >= CONCURRENT + WAITING else None
