"""Start and end the broker of one plugin, and prepare its cage for it, from the launching process.

The broker is forked before the gate, which hands it connections, and ends after it. Its first act is to make
the authority of this launch: the cage has the certificate among its own authorities before anything runs.
"""

from __future__ import annotations

import _socket
import os
import select

from sandbox.broker.placeholder import make_placeholder
from sandbox.cell.beside import fork_beside, lease_beside
from sandbox.network.credentials import BrokerPlan, HiddenValue
from sandbox.plan.layers import LayerUnavailable
from sandbox.plan.plan import LaunchPlan, Operation, ReadOnly, Text
from sandbox.speed.scopes import ExitStack, contextmanager, suppress
from sandbox.speed.signals import signal
from sandbox.speed.typed import TYPE_CHECKING, Callable, Iterator, Mapping, NoReturn

if TYPE_CHECKING:
    from sandbox.spec import Limits

_READY_SECONDS = 30.0
_MOST_CERTIFICATE_BYTES = 64 << 10
_MOST_AUTHORITIES_BYTES = 4 << 20

# Where programs look for authorities: a bundle, by distribution.
_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/ssl/cert.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/tls/cert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
)
# Programs with a list of their own look at a variable; NODE_EXTRA_CA_CERTS adds to the list.
_VARIABLES = (
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO"),
    *("AWS_CA_BUNDLE", "DENO_CERT", "CARGO_HTTP_CAINFO"),
)
BUNDLE = "/.authorities.pem"  # in the cage


class BrokerProcess:
    def __init__(
        self, pid: int, channel: _socket.socket, alive: int, ready: int, hidden: tuple[HiddenValue, ...]
    ) -> None:
        self.pid = pid
        self.channel = channel  # the gate's end
        self._alive = alive
        self._ready = ready
        self._hidden = hidden

    def dress(self, plan: LaunchPlan) -> LaunchPlan:
        """The plan with the placeholders, and with this launch's authority beside those of the system. Where
        a value was filled into the command line or into another variable, its placeholder stands too. Raises
        LayerUnavailable."""
        hidden = self._hidden
        given = {each.name: os.fsdecode(each.placeholder) for each in hidden}

        def covered(text: str) -> str:
            for each in hidden:
                text = text.replace(os.fsdecode(each.value), os.fsdecode(each.placeholder))
            return text

        env = {name: given.get(name) or covered(value) for name, value in plan.env}
        for name in _VARIABLES:
            env.setdefault(name, BUNDLE)
        bundle = _read_authorities() + _read_certificate(self._ready)
        return plan._replace(
            argv=tuple(map(covered, plan.argv)),
            env=tuple(sorted(env.items())),
            operations=_with_bundle(plan.operations, bundle),
        )

    def dismiss(self) -> None:
        """Tell the broker that the plugin has ended: nobody reads the answers any more."""
        with suppress(BrokenPipeError):
            os.write(self._alive, b".")

    def close(self) -> None:
        """End the broker, and reap it. The gate has ended, and with it every connection: nothing is left to
        deliver."""
        self.channel.close()
        for fd in (self._alive, self._ready):
            os.close(fd)
        os.kill(self.pid, signal.SIGKILL)  # nobody else reaps it, so the pid is still its own
        os.waitpid(self.pid, 0)


def _read_authorities() -> bytes:
    for path in _BUNDLES:
        with suppress(OSError), open(path, "rb") as file:
            return file.read(_MOST_AUTHORITIES_BYTES).rstrip(b"\n") + b"\n"
    return b""


def _with_bundle(operations: tuple[Operation, ...], bundle: bytes) -> tuple[Operation, ...]:
    """The bundle, and the same in the places where the system has one."""
    *others, last = operations
    assert last == ReadOnly("/")
    places = dict.fromkeys(os.path.realpath(path) for path in _BUNDLES if os.path.exists(path))
    return (*others, Text(BUNDLE, bundle), *(Text(place, bundle, covers=True) for place in places), last)


def hide_values(plan: BrokerPlan, values: Mapping[str, bytes]) -> tuple[HiddenValue, ...]:
    """A placeholder for each credential. Raises ValueError, which says what is wrong with a value and
    nothing of it."""
    hidden = []
    for credential in plan.credentials:
        try:
            hidden.append(
                HiddenValue(
                    credential.name, make_placeholder(values[credential.name]), values[credential.name]
                )
            )
        except ValueError as error:
            raise ValueError(f"{credential.name} {error}") from None
    return tuple(hidden)


@contextmanager
def open_broker(
    plan: BrokerPlan,
    hidden: tuple[HiddenValue, ...],
    uid_range: tuple[int, int] | None,
    limits: Limits,
    forget: Callable[[], None] | None = None,
) -> Iterator[BrokerProcess]:
    """Start the broker. Raises LayerUnavailable, and OSError if processes or descriptors are exhausted.
    `uid_range`, `forget`: as for the gate."""
    with ExitStack() as stack:
        identity = None
        if uid_range is not None:
            uid, lease = lease_beside(uid_range)
            identity = uid, uid
            stack.callback(os.close, lease)
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0)
        ready_r, ready_w = os.pipe2(os.O_CLOEXEC)
        alive_r, alive_w = os.pipe2(os.O_CLOEXEC)
        its = (theirs.fileno(), plan, hidden, ready_w, alive_r, identity, limits.cpu, limits.cpu_time)
        try:
            pid = fork_beside(lambda: _run_broker(*its), (ours.fileno(), ready_r, alive_w), forget)
        except BaseException:
            for fd in (ready_r, alive_w):
                os.close(fd)
            ours.close()
            raise
        finally:
            for fd in (ready_w, alive_r):
                os.close(fd)
            theirs.close()
        broker = BrokerProcess(pid, ours, alive_w, ready_r, hidden)
        try:
            yield broker
        finally:
            broker.close()


def _read_certificate(ready: int) -> bytes:
    found = b""
    watch = select.poll()
    watch.register(ready, select.POLLIN)
    while len(found) < _MOST_CERTIFICATE_BYTES and watch.poll(_READY_SECONDS * 1000):
        if not (part := os.read(ready, _MOST_CERTIFICATE_BYTES)):
            break
        found += part
    if not found.endswith(b"-----END CERTIFICATE-----\n"):
        hint = "run `runner doctor`; its package cryptography may be missing: install the runner again"
        raise LayerUnavailable("network", "the process that holds the credentials could not start", hint)
    return found


def _run_broker(
    channel: int,
    plan: BrokerPlan,
    hidden: tuple[HiddenValue, ...],
    ready: int,
    alive: int,
    identity: tuple[int, int] | None,
    cores: float | None,
    seconds: float | None,
) -> NoReturn:
    # Imported only in the broker, while the launching process goes on.
    from sandbox.broker.broker import run_broker

    run_broker(channel, plan, hidden, ready, alive, identity, cores=cores, seconds=seconds)
