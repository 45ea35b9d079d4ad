"""What a plugin may ask of its host: one gate in front of services that a library user supplies.

Whether a plugin may ask at all is the policy's to say, whether there is anybody to answer is the services'.
What the question means, and what the answers look like on the wire, is the contract's: its `services` module
has

    METHODS                                       method -> name of the service (a field of Services)
    async serve(method, params, services, emit)   the result; raises HostError
    refused(method, why)                          Answer, as the contract prescribes for what is not there
"""

from __future__ import annotations

import fnmatch
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import trio

from runner.protocol.dialect import Answer, HostCall
from sandbox.value import NamedTuple

# For one plugin: how many of its questions are answered at once, and how many may wait for their turn. Who
# asks more is told so, and not kept waiting: its answers to us come by the same pipe as its questions.
CONCURRENT = 32
WAITING = 256

Emit = Callable[[Any], Awaitable[None]]
Why = Literal["unknown", "denied", "absent", "busy"]


class HostError(Exception):
    """An answer that is a "no": goes to the plugin as an error of its protocol."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data


class MemoryService(Protocol):
    async def recall(self, agent_id: str, query: str, limit: int) -> Sequence[Mapping[str, Any]]:
        """Entries, each with at least id, agent_id and content."""
        ...


class Completion(NamedTuple):
    content: str
    finish_reason: str = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0


class LanguageModel(Protocol):
    async def complete(
        self, request: Mapping[str, Any], delta: Callable[[str], Awaitable[None]] | None
    ) -> Completion:
        """`request` as the plugin sent it, checked for shape. `delta`: it wants the pieces as they come."""
        ...


class Broker(Protocol):
    async def publish(self, event: Mapping[str, Any]) -> None:
        """An event of the plugin's on a topic it may use, with id, timestamp and source filled in by us."""
        ...


class Roots(Protocol):
    async def roots(self) -> Sequence[Mapping[str, Any]]:
        """Each root has a "uri" and may have a "name"."""
        ...


class Sampling(Protocol):
    async def sample(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """A completion by the host's language model, in the words of the plugin's contract."""
        ...


class Elicitation(Protocol):
    async def elicit(self, request: Mapping[str, Any]) -> Mapping[str, Any]: ...


class Services(NamedTuple):
    """What a host offers. None: nothing, and the plugin is told so in the contract's words."""

    memory: MemoryService | None = None
    llm: LanguageModel | None = None
    broker: Broker | None = None
    roots: Roots | None = None
    sampling: Sampling | None = None
    elicitation: Elicitation | None = None

    @property
    def offered(self) -> frozenset[str]:
        return frozenset(name for name in self._fields if getattr(self, name) is not None)


class HostMethods(Protocol):
    """What plugins of one contract may ask of their host: a contract's `services` module."""

    @property
    def METHODS(self) -> Mapping[str, str]:  # noqa: N802 -- a constant of the module
        """Method -> field of Services that serves it."""
        ...

    async def serve(self, method: str, params: Any, services: Services, emit: Emit) -> Any: ...
    def refused(self, method: str, why: Why) -> Answer: ...


class NoHostMethods:
    """For contracts whose plugins ask nothing of their host."""

    METHODS: Mapping[str, str] = {}

    async def serve(self, method: str, params: Any, services: Services, emit: Emit) -> Any:
        raise AssertionError("there is no method to serve")

    def refused(self, method: str, why: Why) -> Answer:
        return Answer(error=(-32601, "method not found", None))


class Gate:
    """For one plugin."""

    def __init__(self, contract: HostMethods, services: Services, allowed: Sequence[str]) -> None:
        self._contract = contract
        self._services = services
        self._allowed = tuple(allowed)
        self._turns = trio.Semaphore(CONCURRENT)
        self._open = 0
        self.served: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.busy: dict[str, int] = {}  # of these, because too many were open or took too much memory

    @property
    def offered(self) -> frozenset[str]:
        """The services there is any use in asking for: somebody answers, and the policy allows it."""
        known = self._contract.METHODS.items()
        return frozenset(name for method, name in known if self.allows(method)) & self._services.offered

    def allows(self, method: str) -> bool:
        return any(fnmatch.fnmatchcase(method, pattern) for pattern in self._allowed)

    async def answer(self, call: HostCall, emit: Emit) -> Answer:
        """Never raises for anything the plugin or a service does, but lets a cancellation through."""
        why = self._why_not(call)
        if why is not None:
            return self._refuse(call, why)
        self.served[call.method] = self.served.get(call.method, 0) + 1
        self._open += 1
        try:
            async with self._turns:
                return Answer(await self._contract.serve(call.method, call.params, self._services, emit))
        except HostError as error:
            return Answer(error=(error.code, str(error), error.data))
        except trio.Cancelled:
            raise
        except Exception as error:  # noqa: BLE001 -- a service of somebody else's; its plugin gets an answer
            return Answer(error=(-32603, f"internal error: {type(error).__name__}", None))
        except BaseExceptionGroup as group:
            # It was given up, and failed at ending: the latter is nobody's answer, and not the session's end.
            given_up, failed = group.split(trio.Cancelled)
            if given_up is None or not isinstance(failed, Exception | None):
                raise
            raise given_up from None
        finally:
            self._open -= 1

    def turn_away(self, call: HostCall) -> Answer:
        """The answer to a question that there is no memory for."""
        return self._refuse(call, self._why_not(call) or "busy")

    def _refuse(self, call: HostCall, why: Why) -> Answer:
        # Counted by what we know, not by what a plugin makes up: its names would be our memory.
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
        if getattr(self._services, service) is None and (allowed or call.expects_answer):
            return "absent"
        if not allowed:
            return "denied"
        return "busy" if self._open >= CONCURRENT + WAITING else None
