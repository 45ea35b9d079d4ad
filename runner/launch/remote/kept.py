"""The launch of a session: from the plan of an earlier one if that holds, and otherwise decided now.

As `runner exec` does it (runner/cli/shared/kept.py). The name of a plan depends on the whole order: on the
invocation, the working directory, the variables that are for the runner, and on what it depends on for every
caller (runner/launch/stored/entry.py). It also depends on the word `session`, which is no verb, and on the
code that the fork server has imported: so no plan of a session is taken for one of `runner exec`, and none
that other code has made.
"""

from __future__ import annotations

from runner.launch.carry_out import LaunchHost
from runner.launch.remote.handover import PassedOn
from runner.launch.remote.messages import LaunchOrder
from runner.launch.run import SeePlanned, run_steps
from runner.launch.stages import Ended, Stopwatch
from runner.launch.stored.code import OwnCode
from runner.launch.stored.entry import Told, forget, say, told_by
from runner.launch.stored.keep import PlanKeeper
from runner.launch.stored.run import DecideAnew, find, kept_steps
from runner.launch.wait import Steps
from sandbox.cell.contents import Contents
from sandbox.codec import as_plain


def told_of(order: LaunchOrder, code: OwnCode | None) -> Told | None:
    """What names the plan of this order. None: nothing is kept for it. Asked in its working directory.

    `code`: of this process; None: it is not known for sure.
    """
    invocation = order.invocation
    # Values that may be secret, or are others at each call. A plan with them is not kept.
    unnamed = invocation.overrides.env or invocation.config or invocation.options or invocation.command
    if code is None or unnamed:
        return None
    asked = repr(as_plain(invocation._replace(args=())))
    told = told_by(("session", code.mark, asked), invocation.args, order.environ, code.files)
    return None if told.name is None else told


def launch_steps(
    order: LaunchOrder,
    host: LaunchHost,
    contents: Contents | None,
    code: OwnCode | None,
    see_planned: SeePlanned | None = None,
) -> Steps[Ended]:
    """One launch in a process that was forked for it. Raises Failure, and CalledOff. If it is PassedOn, the
    exception says what to do when the start has succeeded or failed elsewhere."""
    told = None if contents else told_of(order, code)
    keeper = None
    try:
        if told is not None:
            watch = Stopwatch()
            entry = find(told)
            if entry is not None:
                say("a kept plan is used")
                try:
                    steps = kept_steps(entry, told, order.began, host, see_planned, watch)
                    return (yield from steps)
                except DecideAnew:
                    pass
            keeper = PlanKeeper(told)
        steps = run_steps(order.invocation, order.environ, order.began, host, contents, keeper, see_planned)
        return (yield from steps)
    except PassedOn as passed:
        if keeper is not None:
            passed.on_start = keeper.keep
        elif told is not None:
            passed.on_failure = lambda: forget(told)
        raise
