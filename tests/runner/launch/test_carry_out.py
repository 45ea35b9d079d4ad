"""A plan is carried out by what is in it: no decision is looked at, and no code that decides is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.launch.carry_out import judge_end
from runner.launch.verdict import judge
from runner.launch.wait import End
from sandbox.cell.cell import Exit, Usage
from sandbox.limits.cgroup import Counters
from sandbox.spawn.launcher import ExecReport
from sandbox.spec import Limits
from tests import elsewhere
from tests.conftest import Caller
from tests.manifests import nexo
from tests.tables import one_case
from tests.test_layers import MAKES_PLANS

Write = Callable[..., Path]
MANIFEST = nexo("quick", "/bin/sh") + 'args = ["-c", "exit %d"]\n'


def made_plan(manifest: str) -> str:
    """A plan without what was decided before it, as text."""
    import os

    from runner.launch.rehearse import rehearse
    from runner.launch.stages import Invocation
    from sandbox.speed.codec import pack

    planned = rehearse(Invocation(manifest), os.environ)
    return pack(planned._replace(decided=None)).hex()  # type: ignore[arg-type]


def carried_out(plan: str) -> dict[str, Any]:
    import os
    import sys
    import tempfile
    import time

    from runner.launch.carry_out import judge_end, plan_steps
    from runner.launch.orders import watch_signals
    from runner.launch.sources import HeldSources, Sources
    from runner.launch.stages import Planned, Provision
    from runner.launch.stdio import connect_caller
    from runner.launch.wait import drive
    from sandbox.limits.assigned import AssignedLimit, AssignedLimits, Shares
    from sandbox.limits.site import Hierarchy, Site
    from sandbox.paths.file_identity import FileIdentity
    from sandbox.plan import plan as plans
    from sandbox.plan.layers import Layer, Layers
    from sandbox.spec import Limits, Note
    from sandbox.speed.codec import unpack

    steps: list[str] = []

    class Writer:
        def prepare(self) -> None:
            steps.append("prepares")

        def store(self) -> None:
            steps.append("stores")

    class Host:
        caller = None
        is_ready = False

        def see_ready(self, planned: Any) -> None: ...

        def watch_orders(self) -> Any:
            steps.append("starts")
            return watch_signals()

        def connect(self, acquired: Any) -> Any:
            return connect_caller(acquired.planned.plan.limits)

        def see_started(self, started: Any) -> Any:
            return started

    def unasked() -> Any:
        raise AssertionError("asked again")

    planned = unpack(
        bytes.fromhex(plan),
        (
            *(
                Planned,
                Provision,
                AssignedLimit,
                AssignedLimits,
                Shares,
                Hierarchy,
                Site,
                Layer,
                Layers,
                Limits,
                Note,
            ),
            *(FileIdentity, plans.LaunchPlan, plans.ShownPath, plans.Bind, plans.Tmpfs, plans.Text),
            *(plans.Symlink, plans.Mask, plans.Proc, plans.Dev, plans.ReadOnly),
        ),
    )
    binds = [each for each in planned.plan.operations if isinstance(each, plans.Bind)]
    opened = plans.OpenPlan(
        planned.plan, {each.dest: os.open(each.real, os.O_PATH | os.O_CLOEXEC) for each in binds}
    )
    sources, provision = Sources(), planned.provision
    sources._held = HeldSources(
        opened, planned.limits, provision.sites, provision.own_groups, unasked, unasked
    )
    with tempfile.TemporaryFile() as output:
        saved = os.dup(1)
        os.dup2(output.fileno(), 1)
        try:
            writer: Any = Writer()
            began = time.monotonic()
            ended = drive(plan_steps(planned, os.environ, began, Host(), sources, writer=writer))
        finally:
            os.dup2(saved, 1)
            os.close(saved)
    loaded = [name for name in sys.modules if name.partition(".")[0] in ("runner", "sandbox")]
    outcome, status = judge_end(ended.end, planned.plan.limits)
    uid = [layer.detail for layer in ended.started.planned.layers if layer.name == "uid"]
    told = {"outcome": [outcome.code, status], "loaded": loaded, "uid": uid, "euid": os.geteuid()}
    return {**told, "steps": steps}


@pytest.mark.fresh
@one_case("status", [0, 3])
def test_nothing_that_decides_is_loaded(
    runner_as: Caller, plugin_dir: Path, write_file: Write, status: int
) -> None:
    write_file(plugin_dir / "nexo-plugin.toml", MANIFEST % status)
    plan = elsewhere.run(runner_as, made_plan, str(plugin_dir))
    found = elsewhere.run(runner_as, carried_out, plan)
    assert found["outcome"] == (["ok", 0] if status == 0 else ["crashed", status])
    assert found["steps"] == ["prepares", "starts", "stores"]  # while it runs, only the write is left
    assert found["uid"] != [""] and (found["euid"] == 0 or found["uid"] == [f"uid {found['euid']}"])
    loaded = {name for name in found["loaded"] for each in MAKES_PLANS if f"{name}.".startswith(f"{each}.")}
    assert loaded == set()
    assert "sandbox.identity.state" not in found["loaded"]  # it has none
    assert not {"sandbox.spawn.guards", "sandbox.limits.disk", "sandbox.network.audit"} & {*found["loaded"]}


WELL = End(Exit(0, True, None, Usage(1.0, 0.1, 0.1, 1)), None, None, False)
VIOLATION: Any = type("V", (), {"code": "timeout", "message": "m", "cause": "c", "hint": "h"})
BREACH: Any = type("B", (), {"violation": VIOLATION, "phase": "call"})


@pytest.mark.parametrize(
    "end",
    [
        WELL,
        WELL._replace(forced=True),
        WELL._replace(reason="signal", signal=15),
        WELL._replace(reason="signal", signal=15, forced=True),
        WELL._replace(reason="deadline"),
        WELL._replace(reason="caller_died"),
        WELL._replace(reason="launch"),
        WELL._replace(reason="limit", limit="memory", forced=True),
        WELL._replace(limit="memory"),
        WELL._replace(late=("memory",)),
        WELL._replace(late=("disk",)),
        WELL._replace(breach=BREACH),
        WELL._replace(exit=WELL.exit._replace(counters=Counters(oom_kills=1))),
        WELL._replace(exit=WELL.exit._replace(counters=Counters(oom_kills=1, own_oom=True))),
        WELL._replace(exit=WELL.exit._replace(counters=Counters(pids_refused=1, throttled=1))),
        WELL._replace(exit=WELL.exit._replace(unexecuted=ExecReport(False, 2))),
        WELL._replace(exit=WELL.exit._replace(scratch_full=True)),
        *(WELL._replace(exit=WELL.exit._replace(code=code)) for code in (None, 1, 137, 159)),
    ],
)
def test_the_short_judgement_is_the_long_one(end: End) -> None:
    limits = Limits(memory=1 << 30, disk=1 << 20, launch=1.0, deadline=2.0, pids=3)
    by = (("memory", "manifest"),)
    invocation = SimpleNamespace(command=None)
    planned: Any = SimpleNamespace(grant=SimpleNamespace(decided_by=by), invocation=invocation)
    assert judge_end(end, limits, planned) == judge(end, limits, by)
