"""What is done between the end of a plugin's processes and the judgement of it: the last bytes are delivered,
and every meter looks once more."""

from __future__ import annotations

import math
import time

from runner.launch.wait import GRACE_SECONDS
from sandbox.speed.signals import signal
from sandbox.speed.typed import TYPE_CHECKING, Collection

if TYPE_CHECKING:
    from runner.launch.inspect.inspection import Inspection
    from runner.launch.stages import Started
    from runner.launch.wait import End
    from sandbox.cell.egress import GateProcess

# The host of an inspected plugin may take this long to read the next piece of what the plugin wrote last.
_HOST_READ_SECONDS = 10.0


def finish(started: Started, end: End, stop: Collection[int] = ()) -> tuple[End, bool]:
    """Check all meters again after the end: a plugin may exceed a limit and end before a meter has looked.

    The second value: whether the runner's own stderr can be written to. Its reader may be stuck. A stopped
    terminal is waited for until one of `stop` is readable: a signal arrived, or the caller has ended.
    """
    plumbing, disk = started.plumbing, started.disk
    relay, inspection = plumbing.counter, plumbing.inspection
    delivering = _begin_delivery(started, end)
    if not stop or end.reason is not None:
        writable = plumbing.finish()
    else:
        deadline = started.clocks.deadline
        left = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
        writable = plumbing.finish(left, stop)
    if delivering is not None:
        gate, until = delivering
        gate.drain(until - time.monotonic(), stop)
    started.cell.observation()
    late = [relay.exceeded] if relay is not None and relay.exceeded is not None else []
    if inspection is not None:
        inspection.finish(_HOST_READ_SECONDS)
        end = _with_breach(inspection, end)
        if inspection.exceeded is not None:
            late.append(inspection.exceeded)
    if disk is not None and disk.measure():
        late.append("disk")
    end = _with_sockets(started, end._replace(late=tuple(late)))
    if late and not end.forced and end.breach is None:
        end = end._replace(reason="limit", limit=late[0])
    if disk is not None and end.limit == "disk":
        end = end._replace(detail=disk.why or f"in {disk.where}")
    return _with_oom_around(started, end), writable


def _begin_delivery(started: Started, end: End) -> tuple[GateProcess, float] | None:
    """Let the gate deliver what the plugin had sent. Returns the gate and the deadline for that. None for a
    plugin that was killed: then the gate ends at once."""
    gate = started.cell.gate
    if gate is None or end.forced or end.reason not in (None, "signal"):
        return None
    from sandbox.cell.egress import DELIVERY_SECONDS

    clocks = started.clocks
    seconds = DELIVERY_SECONDS
    if end.reason == "signal":  # the sender expects an end within the grace
        seconds = min(seconds, GRACE_SECONDS if clocks.teardown is None else clocks.teardown)
    until = time.monotonic() + seconds
    gate.dismiss()
    return gate, until if clocks.deadline is None else min(until, clocks.deadline)


def _with_sockets(started: Started, end: End) -> End:
    """The end, with a detail if the memory limit was exceeded by socket buffers, which a cgroup does not
    count."""
    held = max((meter.peaks().get("memory", 0) for meter in started.meters), default=0)
    usage = end.exit.usage
    if held <= (usage.memory_peak or 0):
        return end
    detail = "with what its sockets held in the kernel" if end.limit == "memory" else end.detail
    return end._replace(exit=end.exit._replace(usage=usage._replace(memory_peak=int(held))), detail=detail)


def _with_oom_around(started: Started, end: End) -> End:
    """The end, with an out-of-memory kill in a group around the runner as its cause: SIGKILL ended the plugin
    while the kernel killed there."""
    ended = end.exit
    if started.oom_around is None or end.reason is not None or end.forced:
        return end
    if ended.code != 128 + signal.SIGKILL and ended.signal != signal.SIGKILL:
        return end
    kills = started.oom_around.since()
    counters = ended.counters._replace(oom_kills=kills)
    return end._replace(exit=ended._replace(counters=counters)) if kills else end


def _with_breach(inspection: Inspection, end: End) -> End:
    """The end, with a breach of the contract as its cause. Not if there was another cause before: a plugin
    that is ended may stop in the middle of a message."""
    breach = inspection.breach
    if end.reason not in (None, "violation"):
        return end
    if breach is None:
        return end._replace(breach=inspection.unanswered()) if inspection.left_waiting else end
    return end._replace(reason="violation", breach=breach, limit=end.limit or breach.limit)
