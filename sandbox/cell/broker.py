"""Start and end the broker of one plugin, and prepare its cage for it, from the launching process.

The broker is forked before the gate, which hands it connections, and ends after it. A process before both
makes the authority of this launch: the cage has its certificate before anything runs.
"""

from __future__ import annotations

import _socket
import os
import select

from sandbox.broker.placeholder import cover, make_placeholder
from sandbox.cell.beside import fork_beside, lease_beside
from sandbox.cell.contents import Contents
from sandbox.network.credentials import AUTHORITIES, BUNDLE, BrokerPlan, CertifiedHosts, HiddenValue
from sandbox.plan.layers import LayerUnavailable
from sandbox.plan.plan import Bind, LaunchPlan, Operation, ReadOnly, Text
from sandbox.speed.scopes import ExitStack, contextmanager, suppress
from sandbox.speed.signals import signal
from sandbox.speed.typed import TYPE_CHECKING, Iterator, NoReturn

if TYPE_CHECKING:
    from sandbox.spec import Limits

_READY_SECONDS = 30.0
_MOST_CERTIFICATE_BYTES = 64 << 10
_MOST_AUTHORITIES_BYTES = 4 << 20

# Programs with a list of their own look at a variable; NODE_EXTRA_CA_CERTS adds to the list.
_VARIABLES = tuple(
    (
        "SSL_CERT_FILE REQUESTS_CA_BUNDLE CURL_CA_BUNDLE NODE_EXTRA_CA_CERTS GIT_SSL_CAINFO AWS_CA_BUNDLE"
        " DENO_CERT CARGO_HTTP_CAINFO"
    ).split()
)


class BrokerProcess:
    def __init__(
        self,
        channel: _socket.socket,
        alive: int,
        held: ExitStack,
        authority: _Authority,
        hidden: tuple[HiddenValue, ...],
        others: tuple[tuple[bytes, bytes], ...],
    ) -> None:
        self.channel = channel  # the gate's end
        self._alive = alive
        self._held = held
        self._authority = authority
        self._hidden = hidden
        self._others = others  # values that are hidden too, and never sent

    def dress(self, plan: LaunchPlan) -> LaunchPlan:
        """The plan with the placeholders, and with this launch's authority beside those of the system. Where
        a value was filled into the command line or into another variable, its placeholder stands too. Raises
        LayerUnavailable."""
        given = {each.name: os.fsdecode(each.placeholder) for each in self._hidden}

        def covered(text: str) -> str:
            return os.fsdecode(self._cover(os.fsencode(text)))

        env = {name: given.get(name) or covered(value) for name, value in plan.env}
        for name in _VARIABLES:
            env.setdefault(name, BUNDLE)
        bundle = _read_authorities() + self._authority.read_certificate()
        return plan._replace(
            argv=tuple(map(covered, plan.argv)),
            env=tuple(sorted(env.items())),
            operations=_with_bundle(plan, bundle),
        )

    def dress_files(self, contents: Contents) -> Contents:
        """The files in memory, with the placeholders."""
        secrets, files = (
            {name: self._cover(value) for name, value in part.items()}
            for part in (contents.secrets, contents.files)
        )
        return Contents(secrets, files, contents.hidden)

    def _cover(self, data: bytes) -> bytes:
        return cover(data, [*((each.value, each.placeholder) for each in self._hidden), *self._others])

    def begin(self) -> None:
        """Let the broker load what it needs: the launch has done its part, and needs the processors less."""
        self._held.close()

    def dismiss(self) -> None:
        """Tell the broker that the plugin has ended: nobody reads the answers any more."""
        with suppress(BrokenPipeError):
            os.write(self._alive, b".")


class _Authority:
    """The process that makes the certificates. It ends by itself."""

    def __init__(self, pid: int, ready: int) -> None:
        self._pid = pid
        self._ready = ready

    def __enter__(self) -> _Authority:
        return self

    def __exit__(self, *_: object) -> None:
        self._reap()

    def read_certificate(self) -> bytes:
        """Raises LayerUnavailable."""
        found = b""
        watch = select.poll()
        watch.register(self._ready, select.POLLIN)
        while len(found) < _MOST_CERTIFICATE_BYTES and watch.poll(_READY_SECONDS * 1000):
            if not (part := os.read(self._ready, _MOST_CERTIFICATE_BYTES)):
                break
            found += part
        if not found.endswith(b"-----END CERTIFICATE-----\n"):
            hint = "the OpenSSL of this Python makes them; install the runner for the system's own Python"
            raise LayerUnavailable("network", "the certificates of this launch could not be made", hint)
        self._reap()
        return found

    def _reap(self) -> None:
        if self._pid:
            os.waitpid(self._pid, 0)
            self._pid = 0


def _read_authorities() -> bytes:
    for path in AUTHORITIES:
        with suppress(OSError), open(path, "rb") as file:
            return file.read(_MOST_AUTHORITIES_BYTES).rstrip(b"\n") + b"\n"
    return b""


def _with_bundle(plan: LaunchPlan, bundle: bytes) -> tuple[Operation, ...]:
    """The bundle, and the same in the places where the system has one."""
    operations = plan.operations
    # The root of an image with a layer stays writable.
    others, last = (operations[:-1], operations[-1:]) if operations[-1] == ReadOnly("/") else (operations, ())
    # An image has the system's in places of its own.
    places = dict.fromkeys(op.dest for op in operations if isinstance(op, Bind) and op.dest in AUTHORITIES)
    # The host's own places may lead through links in an image.
    if not places and not plan.image:
        places = dict.fromkeys(os.path.realpath(path) for path in AUTHORITIES if os.path.exists(path))
    return (*others, Text(BUNDLE, bundle), *(Text(place, bundle, covers=True) for place in places), *last)


def _hide(plan: BrokerPlan, contents: Contents | None) -> tuple[HiddenValue, ...]:
    """A placeholder for each credential."""
    values = {} if contents is None else contents.hidden
    return tuple(
        HiddenValue(each.name, make_placeholder(values[each.name]), values[each.name])
        for each in plan.credentials
    )


@contextmanager
def open_broker(
    plan: BrokerPlan, contents: Contents | None, uid_range: tuple[int, int] | None, limits: Limits
) -> Iterator[BrokerProcess]:
    """Start the broker. Raises LayerUnavailable, and OSError if processes or descriptors are exhausted.
    `uid_range`: as for the gate. `contents`: has the values."""
    with ExitStack() as stack:
        (ready, ready_w), (chain, chain_w) = (os.pipe2(os.O_CLOEXEC) for _ in range(2))
        stack.callback(os.close, ready)
        held = stack.enter_context(ExitStack())
        held.callback(os.close, chain_w)  # the broker waits for the end of what comes through it
        with ExitStack() as theirs:
            for fd in (ready_w, chain):
                theirs.callback(os.close, fd)
            # First: it takes longest, and the launch needs its result.
            pid = fork_beside(lambda: _run_authority(plan.certified, ready_w, chain_w), (ready, chain), None)
            authority = stack.enter_context(_Authority(pid, ready))
            identity = None
            if uid_range is not None:
                uid, lease = lease_beside(uid_range)
                identity = uid, uid
                stack.callback(os.close, lease)
            hidden = _hide(plan, contents)
            ours, channel = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0)
            stack.callback(ours.close)
            theirs.callback(channel.close)
            alive_r, alive = os.pipe2(os.O_CLOEXEC)
            stack.callback(os.close, alive)
            theirs.callback(os.close, alive_r)
            its = (channel.fileno(), plan, hidden, chain, alive_r, identity, limits.cpu, limits.cpu_time)
            secrets = contents or Contents()
            environ = dict(os.environb)
            closed = ours.fileno(), ready, alive, ready_w, chain_w
            pid = fork_beside(lambda: _run_broker(*its), closed, lambda: secrets.wipe_of_others(environ))
            stack.callback(_end, pid)
        names = {each.name for each in plan.credentials}
        values = {} if contents is None else contents.hidden
        others = tuple((value, b"*" * len(value)) for name, value in values.items() if name not in names)
        yield BrokerProcess(ours, alive, held, authority, hidden, others)


def _end(pid: int) -> None:
    """The gate has ended, and with it every connection: nothing is left to deliver."""
    os.kill(pid, signal.SIGKILL)  # nobody else reaps it, so the pid is still its own
    os.waitpid(pid, 0)


def _run_authority(hosts: CertifiedHosts, told: int, chain: int) -> NoReturn:
    from sandbox.broker.authority import run_authority

    run_authority(hosts, told, chain)
    os._exit(0)


def _run_broker(
    channel: int,
    plan: BrokerPlan,
    hidden: tuple[HiddenValue, ...],
    chain: int,
    alive: int,
    identity: tuple[int, int] | None,
    cores: float | None,
    seconds: float | None,
) -> NoReturn:
    # Imported only in the broker, while the launching process goes on.
    from sandbox.broker.broker import run_broker

    run_broker(channel, plan, hidden, chain, alive, identity, cores=cores, seconds=seconds)
