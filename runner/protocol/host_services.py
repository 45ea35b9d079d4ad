"""A plugin's requests to its host, and the services that a library user supplies.

The policy decides whether a plugin may ask: service_guard.py. The library user's Services decide whether
there is an answer. The contract defines requests and their answers on the wire (HostMethods). It judges each
request by what was granted (paths, hosts, topics, scopes) before it calls a service, whether that is the
runner's or the user's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from runner.plugin import Plugin
from runner.protocol.dialect import Answer, Call, Notice
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from runner.protocol.bus import Room, SnapshotBus

Emit = Callable[[Any], Awaitable[None]]
# Sends the plugin a notification: method and params. It never blocks, and it never raises: what the contract
# cannot send is dropped and counted. A plugin for which too much waits is ended.
Tell = Callable[[str, Any], None]
# Calls the plugin, and returns its answer. Raises HostError.
Ask = Callable[[Call], Awaitable[Any]]
Why = Literal["unknown", "denied", "absent", "busy"]


class HostError(Exception):
    """Raised by a service that refuses. The plugin gets it as an error of its protocol."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data


class Granted(NamedTuple):
    """The plugin that asks a service, and what it was granted. The contract has checked the request already;
    a service can use this to be stricter."""

    plugin: Plugin  # what its manifest says
    method: str = ""  # what it asks for; empty for a Gateway, which the host asks
    folders: tuple[str, ...] = ()  # for a FileReader: each path lies in one of these, which are no links
    hosts: tuple[str, ...] = ()  # for a Fetcher: each URL is for one of these, as in "*.example.com:443"

    @staticmethod
    def current() -> Granted:
        """The grant of the request that this task or thread serves. Raises LookupError outside of a
        service."""
        try:
            return _current.get()
        except LookupError:
            message = "Granted.current() is for services, while they serve a request of a plugin"
            raise LookupError(message) from None


_current: ContextVar[Granted] = ContextVar("granted")


@contextmanager
def granting(value: Granted) -> Iterator[None]:
    """Make it the current one for services that are called in the body."""
    token = _current.set(value)
    try:
        yield
    finally:
        _current.reset(token)


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
        """`request` as the plugin sent it, with its types checked. `delta` is given if the plugin wants each
        piece at once."""
        ...


class Broker(Protocol):
    async def publish(self, event: Mapping[str, Any]) -> None:
        """An event from the plugin on a topic it may use. The runner sets id, timestamp and source."""
        ...


class Roots(Protocol):
    async def roots(self) -> Sequence[Mapping[str, Any]]:
        """Each root has a "uri" and may have a "name"."""
        ...


class Sampling(Protocol):
    async def sample(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """A completion by the host's language model, in the format of the plugin's contract."""
        ...


class Elicitation(Protocol):
    async def elicit(self, request: Mapping[str, Any]) -> Mapping[str, Any]: ...


class KeyValueStore(Protocol):
    """Values of one plugin that outlive it. Each raises HostError."""

    async def get(self, key: str) -> Any:
        """Raises KeyError if there is no such key."""
        ...

    async def set(self, key: str, value: Any) -> None: ...

    async def delete(self, key: str) -> bool:
        """Whether there was such a key."""
        ...

    async def list(self, prefix: str, after: str, limit: int) -> Sequence[str]:
        """Keys in order, those behind `after` only."""
        ...


class DirectoryEntry(NamedTuple):
    name: str
    is_dir: bool  # of the entry itself: a symbolic link to a directory is none
    size: int  # bytes; 0 for a directory


class FileReader(Protocol):
    """Files of the host, for a plugin that may read some of them. Each raises HostError.

    It is asked only for paths in `Granted.current().folders` that the plugin may read, and for names there
    that do not exist. The path has no link in it, nor "..". The plugin cannot change what is there. If others
    can, let no link be followed when you open it (openat2 with RESOLVE_NO_SYMLINKS).
    """

    async def read_file(self, path: str) -> bytes: ...

    async def read_dir(self, path: str) -> Sequence[DirectoryEntry]: ...


class Fetched(NamedTuple):
    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes


class Fetcher(Protocol):
    """The network, for a plugin that may reach some hosts of it.

    It is asked only for URLs of `Granted.current().hosts`: https, in their normal spelling. It must not
    follow redirects: the runner does, and judges each URL first. Which addresses a name may lead to is for it
    to judge.
    """

    async def fetch(
        self, url: str, method: str, headers: Sequence[tuple[str, str]], body: bytes | None
    ) -> Fetched:
        """Raises HostError."""
        ...


class DelegationRequest(NamedTuple):
    """Credentials that one call of a plugin asks for."""

    scopes: tuple[str, ...]  # no others may be given
    seconds: float  # how long the token may live: until the deadline of the call and its grace
    call: str  # the contract's id of the call
    org: str = ""
    project: str = ""


class Delegation(NamedTuple):
    base_url: str
    token: str  # a secret
    scopes: tuple[str, ...]  # those that it has, at most those that were asked for


class Gateway(Protocol):
    """Makes short-lived tokens for the host's own interface, which a plugin may then use."""

    async def delegate(self, request: DelegationRequest) -> Delegation:
        """Raises HostError."""
        ...


class Services(NamedTuple):
    """The services of a host. None: it has no such service, and the plugin gets the contract's answer for
    that."""

    memory: MemoryService | None = None
    llm: LanguageModel | None = None
    broker: Broker | None = None
    roots: Roots | None = None
    sampling: Sampling | None = None
    elicitation: Elicitation | None = None
    storage: KeyValueStore | None = None
    bus: SnapshotBus | None = None  # sessions with the same one share their topics and actions
    log_level: str | None = None  # the lowest level of a plugin's log messages that become events
    files: FileReader | None = None
    fetcher: Fetcher | None = None
    gateway: Gateway | None = None

    @property
    def offered(self) -> frozenset[str]:
        return frozenset(name for name in self._fields if getattr(self, name) is not None)


class HostMethods(Protocol):
    """The requests that plugins of one contract may send: a contract's `services` module."""

    @property
    def METHODS(self) -> Mapping[str, str]:  # noqa: N802 -- a constant of the module
        """Method -> field of Services that serves it. Empty: it needs none."""
        ...

    async def serve(self, method: str, params: Any, services: Services, emit: Emit) -> Any:
        """The result. Raises HostError."""
        ...

    def refused(self, method: str, why: Why) -> Answer:
        """The contract's answer to a request that is not served."""
        ...


@runtime_checkable
class LiveMethods(Protocol):
    """What a HostMethods may also have: services that send the plugin notifications at any time. None of
    the methods may raise."""

    def attach(self, tell: Tell, room: Room) -> None:
        """Called when the session is made. Notifications before the handshake are sent after it. `room` waits
        until the plugin has room for more of them."""
        ...

    async def published(self) -> None:
        """Wait until those who get what the plugin published have room for more. Until then nothing more is
        read from it."""
        ...

    def detach(self) -> None:
        """Called once when the session is over, also if it failed."""
        ...


@runtime_checkable
class ConnectedMethods(Protocol):
    """What LiveMethods may also have: services that act without a request of the plugin."""

    def connect(self, services: Services, allows: Callable[[str], bool], ask: Ask) -> None:
        """Called before `attach`. `allows`: whether the policy allows a method."""
        ...


@runtime_checkable
class LongMethods(Protocol):
    """What a HostMethods may also have: requests whose answers can take many bytes."""

    @property
    def LONG(self) -> Mapping[str, tuple[str, int]]:  # noqa: N802 -- a constant of the class
        """Method -> a name for those that share a queue, and how many of that queue are served at a time."""
        ...


@runtime_checkable
class NotedMethods(Protocol):
    """What a HostMethods may also have: notifications of the plugin that are served at once, in the order in
    which they came. Requests, and notifications of other contracts, are served by tasks of their own."""

    def note(self, method: str, params: Any, services: Services) -> Sequence[Notice]:
        """Serve it, and return notices for the host. Raises HostError if it is refused."""
        ...

    def ignored(self, method: str, why: Why, reason: str = "") -> Sequence[Notice]:
        """Notices for the host about a notification that is not served. `reason`: the HostError of `note`."""
        ...


class NoHostMethods:
    """For contracts whose plugins send no requests to their host."""

    METHODS: Mapping[str, str] = {}

    async def serve(self, method: str, params: Any, services: Services, emit: Emit) -> Any:
        raise AssertionError("there is no method to serve")

    def refused(self, method: str, why: Why) -> Answer:
        return Answer(error=(-32601, "method not found", None))
