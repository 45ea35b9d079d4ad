"""Which plans may be parked, and the facts that a parked cell rests on.

A parked cell rests on a decision that was made earlier, as a stored plan does. So the facts are noted while
the plan is made, and each is asked again before the release (sandbox/facts.py). If one has changed, the cell
is thrown away, and the launch is decided anew.

The process that plans notes the facts, and the host asks them again: a slow filesystem then keeps no other
plugin of a shared monitor waiting.
"""

from __future__ import annotations

import marshal
from typing import TYPE_CHECKING, Any

from sandbox.facts import Facts
from sandbox.speed.codec import MARSHAL_FORMAT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.launch.stages import Planned
    from sandbox.look import AskedFacts

# Each home of a machine has some 200 that the denylist asks for.
_MOST_FACTS = 4096
# What a launch found out about cgroups decides how they are made. A parked cell is in its cgroups already,
# and these answers differ from process to process: every launch makes groups.
_CGROUPS = ("/sys/fs/cgroup", "/proc/self/cgroup", "/proc/self/ns/cgroup")


def parking_fault(planned: Planned, asked: AskedFacts) -> str:
    """Reason why this plan must not be parked, or ''."""
    from runner.launch.remote.shared_plan import can_be_shared

    plan, decided = planned.plan, planned.decided
    if plan.memory_files:
        return "it gets secrets, or files that exist only in memory"
    if planned.grant.scratch is not None:
        return "it has a folder that is made for one call"
    if decided.signed is not None or decided.copy:
        return "its package is copied and checked at each launch"
    if plan.owners is not None or plan.guards or plan.idmapped:
        return "it writes to folders of the host, which are looked at each time"
    if not can_be_shared(planned):
        return "it has hosts, a disk or io limit, very little of a processor, or no cage"
    if sum(len(each) for each in _kinds(asked)) > _MOST_FACTS:
        return f"its plan rests on more than {_MOST_FACTS} facts"
    return asked.storing_fault()


def pack_facts(asked: AskedFacts) -> bytes:
    kept = [{} if each is asked.facts.alone else _outside_cgroups(each) for each in _kinds(asked)]
    return marshal.dumps(kept, MARSHAL_FORMAT)


def _kinds(asked: AskedFacts) -> tuple[dict[Any, Any], ...]:
    return asked.facts


def _outside_cgroups(facts: Mapping[Any, Any]) -> dict[Any, Any]:
    return {
        key: answer
        for key, answer in facts.items()
        if not str(key[0] if isinstance(key, tuple) else key).startswith(_CGROUPS)
    }


def changed_fact(packed: bytes, environ: Mapping[str, str]) -> str:
    """Name the first fact that has changed, or ''. Looks at files, so it must not run in an event loop.

    `packed`: from a process of ours. It is not checked."""
    return Facts(*marshal.loads(packed)).changed(environ)
