"""Start and end the gate of one plugin, from the launching process. It is started before the plugin.

The gate is forked and not executed, and confines itself before it serves. It gets the sockets of the plugin's
network namespace from the process that made that namespace. When the plugin has ended, a byte on a pipe tells
the gate to deliver what the plugin has sent, and then to end. It ends at once when the launching process ends
or closes that pipe. If the gate cannot start, the plugin is not started either.
"""

from __future__ import annotations

import _socket
import os

from sandbox.cell.beside import AuditedProcess, BesideEnds, fork_audited
from sandbox.network.egress import EgressPlan
from sandbox.network.recipe import find_recipe
from sandbox.spawn.network import outside_network
from sandbox.spawn.order import NetworkOrder
from sandbox.speed.bundle import expect, load
from sandbox.speed.scopes import contextmanager, suppress
from sandbox.speed.typed import TYPE_CHECKING, Callable, Iterator, NoReturn

if TYPE_CHECKING:
    from sandbox.cell.broker import BrokerProcess
    from sandbox.spec import Limits

# How long the gate may take to deliver what a plugin had sent when it ended. Resolving and connecting are
# part of it, and a server may read slowly. The gate ends as soon as it has nothing to deliver.
DELIVERY_SECONDS = 5.0


class GateProcess(AuditedProcess):
    broker: BrokerProcess | None = None  # to which it hands connections

    def __init__(
        self, pid: int, audit_fd: int, alive: int, order: NetworkOrder, channel: _socket.socket
    ) -> None:
        super().__init__(pid, audit_fd, alive, channel)
        self.order = order  # for the spawner

    def dismiss(self) -> None:
        """Tell the gate that the plugin has ended. It delivers what the plugin had sent, and ends; `drain`
        waits for that."""
        self.close_channel()
        with suppress(BrokenPipeError):
            os.write(self._alive, b".")
        if self.broker is not None:
            self.broker.dismiss()


@contextmanager
def open_gate(
    egress: EgressPlan,
    uid_range: tuple[int, int] | None,
    until: float | None,
    plugin: Limits | None,
    forget: Callable[[], None] | None,
    broker: int,
) -> Iterator[GateProcess]:
    """Start the gate. Raises LayerUnavailable, and OSError if processes or descriptors are exhausted.

    `uid_range`: for the gate's own uid, if the caller is root. `until`: see NetworkOrder. `plugin`: its
    limits; those of processor time also bound the gate. `forget`: called in the gate, to remove what it must
    not have. `broker`: the socket to the broker, if the plan has one. The gate then waits for its sockets,
    and tells the cell's init when it serves.
    """
    recipe = find_recipe(egress)
    if plugin is not None:
        egress = egress._replace(limits=egress.limits._replace(cpu=plugin.cpu, cpu_time=plugin.cpu_time))

    def run(ends: BesideEnds) -> None:
        _run_gate(ends.channel, egress, ends.audit, ends.alive, ends.identity, broker)

    def make(pid: int, audit: int, alive: int, channel: _socket.socket) -> GateProcess:
        order = NetworkOrder(recipe, channel.fileno(), outside_network(), until)
        return GateProcess(pid, audit, alive, order, channel)

    with fork_audited(run, uid_range, forget, make) as gate:
        expect("gate")
        yield gate


def _run_gate(
    channel: int,
    egress: EgressPlan,
    audit: int,
    alive: int,
    identity: tuple[int, int] | None,
    broker: int,
) -> NoReturn:
    # Loaded only in the gate, while this process goes on with the launch.
    load("gate")
    from sandbox.gate.gate import run_gate

    run_gate(channel, egress, audit, alive, identity, broker)
