"""The gate of one plugin: a process of its own, forked and not exec'd, confined before the plugin starts.

    P --fork--> gate: reads the resolver's configuration, receives the sockets, confines itself, "g", serves
    cell's init: makes the namespace and the sockets, sends them, waits for the "g"

When the plugin has ended, a byte arrives on the pipe `alive`: the gate then delivers what the plugin has
sent, and ends. It ends at once when the process that forked it ends, when `alive` is closed, or after an
unexpected error. No other process has the listeners, so after the gate has ended, connections are refused.

The gate is in none of the plugin's cgroups: it has to write its last audit lines when the plugin is killed or
frozen, and the plugin's memory limit must not end it. So it measures its own processor time, after each turn
of the loop, and holds itself to the limits of the plugin that causes it.
"""

from __future__ import annotations

import _socket as socket
import encodings.ascii
import encodings.utf_8  # noqa: F401 -- loaded now: on first use no file can be opened any more
import gc
import os

from sandbox.gate.audit import AuditPipe, ReaderGone, encode_line, report_fault
from sandbox.gate.broker_channel import BrokerChannel
from sandbox.gate.calls import gate_filter
from sandbox.gate.confine import (
    ConfinementError,
    close_others,
    confine,
    follow_parent,
    forget_environment,
    is_alive,
    leave_terminal,
)
from sandbox.gate.cpu_limiter import CpuLimiter, CpuTimeSpent
from sandbox.gate.flows import Flows
from sandbox.gate.loop import READ, Loop
from sandbox.gate.name_server import MOST_CLIENTS, Answerer, NameRules, NameService
from sandbox.gate.names import NameTable
from sandbox.gate.resolver import MOST_QUERIES, Resolver
from sandbox.gate.upstream import read_upstream
from sandbox.network.addresses import refusal
from sandbox.network.egress import EgressLimits, EgressPlan, GateSockets
from sandbox.network.rules import parse_rules
from sandbox.network.sockets import MOST_SOCKETS, receive_sockets, send_ready
from sandbox.seccomp.filter import machine_arch
from sandbox.speed.typed import NoReturn

# Exit codes of the gate's process.
EXIT_ENDED = 0  # the plugin has ended, or nobody reads the audit lines
EXIT_FAULT = 70  # an unexpected error while serving
EXIT_UNCONFINED = 125  # it could not be confined, and never served

# Two sockets and, if both readers are slow, two pipes.
_FDS_PER_CONNECTION = 6
# While a name is resolved: the plugin's socket, and those of the queries for A and AAAA.
_FDS_PER_SEARCH = 1 + 2 * MOST_QUERIES
_MORE_FDS = 64

_PLUGIN_ENDED = "was closed: the plugin has ended"
_CUT = "was cut: the plugin has ended, and what it had sent was not delivered in time"


class _Ended(Exception):
    """The plugin has ended, or the launching process."""


def run_gate(
    channel: int,
    plan: EgressPlan,
    audit: int,
    alive: int,
    identity: tuple[int, int] | None,
    broker: int = -1,
) -> NoReturn:
    """Confine this process and serve until the plugin has ended. Call it in a forked child of a process with
    one thread.

    `channel`: the socket on which the cell's init sends the listeners and waits for "g". `audit`: the pipe
    for audit lines. `alive`: a pipe from which a byte comes when the plugin has ended, and which is closed
    when the gate has to end at once. `identity`: the uid and gid to change to, if root. `broker`: the socket
    to the broker, if the plan has one. A gate that cannot be confined never writes the "g"; it writes
    {"kind": "fault", "reason": ...} to `audit`.
    """
    code = EXIT_UNCONFINED
    try:
        # The collector would touch objects of the launching process, and so copy the pages they are in.
        gc.freeze()
        leave_terminal()
        close_others({channel, audit, alive} | ({broker} if broker >= 0 else set()))
        os.set_blocking(audit, False)
        follow_parent(lambda: is_alive(alive))
        forget_environment()
        gate = PluginGate(plan, audit, broker)
        gate.open(receive_sockets(channel), alive)
        _preload()
        program = gate_filter(machine_arch(), broker=broker >= 0)
        confine(identity, count_descriptors(plan.limits), lambda: is_alive(alive), program)
        send_ready(channel)
        os.close(channel)
        code = EXIT_FAULT
        gate.serve()
        code = EXIT_ENDED
    except (ConfinementError, OSError, ValueError) as error:
        report_fault(audit, str(error))
    except BaseException as error:  # noqa: BLE001 -- below us is the stack of the launching process
        report_fault(audit, repr(error))
    finally:
        os._exit(code)


class PluginGate:
    """The event loop of one plugin's gate, with its name service and its connections."""

    def __init__(self, plan: EgressPlan, audit: int, broker: int = -1) -> None:
        self._plan = plan
        self._rules = parse_rules(plan.rules, ranges=True)
        self._names = NameRules(self._rules)
        self._loop = Loop()
        self._audit = AuditPipe(self._loop, audit)
        upstream = read_upstream(lambda name: self._names.find(name) is not None)
        self._resolver = Resolver(self._loop, upstream)
        self._table = NameTable(plan.limits.names)
        self._broker: BrokerChannel | None = None
        if plan.broker is not None:
            self._broker = BrokerChannel(self._loop, broker, parse_rules(plan.broker.hosts), self._audit)
        self._alive = -1
        self._flows: Flows | None = None
        self._service: NameService | None = None
        self._cpu_limiter: CpuLimiter | None = None

    def open(self, sockets: GateSockets, alive: int) -> None:
        listeners = [socket.socket(fileno=fd) for fd in sockets.listeners]
        redirected = [socket.socket(fileno=fd) for fd in sockets.redirected]
        has_ipv6 = any(each.family == socket.AF_INET6 for each in (*listeners, *redirected))
        self._flows = Flows(
            self._loop, self._plan, self._rules, self._table, self._resolver, self._audit, self._broker
        )
        self._flows.listen(listeners, redirected)
        for fd in sockets.closed_ports:
            self._flows.watch_closed_ports(socket.socket(fileno=fd))
        answerer = Answerer(self._loop, self._names, self._table, self._audit, ipv6=has_ipv6)
        udp, tcp = socket.socket(fileno=sockets.dns_udp), socket.socket(fileno=sockets.dns_tcp)
        self._service = NameService(self._loop, answerer, udp, tcp)
        self._alive = alive
        self._loop.watch(alive, READ, self._on_end)
        self._cpu_limiter = CpuLimiter(self._plan.limits.cpu, self._plan.limits.cpu_time, alive)

    def serve(self) -> None:
        """Serve until the plugin has ended. Connections that are open then still get their audit line."""
        assert self._cpu_limiter is not None
        try:
            self._loop.run(self._cpu_limiter.throttle)
        except _Ended:
            assert self._flows is not None
            self._end_all(_CUT if self._flows.leaving else _PLUGIN_ENDED)
        except CpuTimeSpent:
            self._end_all(
                "was closed: the gate has used as much processor time as the plugin may (the cpu_time limit)"
            )
        except ReaderGone:
            pass

    def _end_all(self, reason: str) -> None:
        assert self._flows is not None
        try:
            self._audit.wait_for_room()
            if self._broker is not None:
                self._broker.read()
            self._flows.end_all(reason)
            self._audit.write_totals()
        except ReaderGone:
            pass

    def _on_end(self, _: int) -> None:
        assert self._flows is not None
        if not os.read(self._alive, 1):
            raise _Ended
        if not self._flows.leaving:
            self._flows.deliver_all(_PLUGIN_ENDED, self._on_delivered)

    def _on_delivered(self) -> None:
        raise _Ended


def count_descriptors(limits: EgressLimits) -> int:
    """The most descriptors that the gate can need under these limits."""
    per_connection = max(_FDS_PER_CONNECTION, _FDS_PER_SEARCH)
    return limits.connections * per_connection + MOST_CLIENTS + MOST_SOCKETS + _MORE_FDS


def _preload() -> None:
    """Load modules, codecs and tables that Python loads on first use: after confinement no file opens."""
    refusal("93.184.216.34")
    refusal("2606:2800:220:1::1")
    str(OSError(1, os.strerror(1)))
    encode_line({"number": 1.5, "text": "\u00e9"})
