"""The owners of what a plugin writes to folders of the host."""

from __future__ import annotations

import stat

from sandbox.paths.denied_paths import normal
from sandbox.paths.source import OpenSource
from sandbox.plan.owners import Decision, WriteRequest
from sandbox.plan.plan import Bind, OpenPlan, PlanRefused
from sandbox.typed import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.launch.stages import Planned


def confirm_owners(owners: Decision, planned: Planned, opened: OpenPlan, uid: int) -> Decision:
    """The owners of what the plugin writes, with the uid it got. Raises PlanRefused if that one is another
    than was expected, and may not write there."""
    where = {path.path: path.where for path in planned.grant.paths}
    strangers = {each.path: each.strangers for each in owners.paths}
    asked = [
        WriteRequest(
            OpenSource(
                normal(bind.dest),
                bind.real,
                opened.descriptors[bind.dest],
                bind.identity,
                "dir" if stat.S_ISDIR(bind.identity.mode) else "file",
                "write",
                strangers=strangers[normal(bind.dest)],
            ),
            where.get(bind.dest, ()),
        )
        for bind in planned.plan.operations
        if isinstance(bind, Bind) and bind.writable and normal(bind.dest) in strangers
    ]
    confirmed = owners.confirmed(asked, uid)
    if confirmed.denials:
        raise PlanRefused(confirmed.denials)
    return confirmed
