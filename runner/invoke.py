"""Invocation -> Report: the start of what was prepared, and the ONE place that says what an ending means."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from runner import __version__
from runner.manifest import position
from runner.prepare import Prepared
from runner.report import EXEC_DEADLINE, EXEC_NO_CAGE, SCHEMA, Outcome
from runner.watch import End
from sandbox import seccomp
from sandbox.cell import Cell, launched
from sandbox.diagnostic import Diagnostic
from sandbox.layers import Layer
from sandbox.plan import OpenPlan
from sandbox.spec import Denial

_SIGSYS_STATUS = 128 + 31


@contextmanager
def confine(prepared: Prepared, opened: OpenPlan) -> Iterator[Cell]:
    """Start what `ready` has made ready. Raises SpawnError."""
    assert prepared.owner is not None and prepared.policy is not None and prepared.grant is not None
    if prepared.grant.unsandboxed:
        from sandbox.bare import bare_cell

        with bare_cell(opened.plan) as cell:
            yield cell
        return
    with launched(opened, prepared.owner, prepared.bwrap) as cell:
        yield cell


def judge(end: End) -> tuple[Outcome, int]:
    """What an ending means, and the exit status `runner exec` passes on. First cause wins."""
    code = end.exit.code
    if end.reason == "deadline":
        return Outcome(
            "timeout", "invocation", "the deadline passed", "deadline", "raise --deadline"
        ), EXEC_DEADLINE
    if end.reason == "caller_died":
        return Outcome(
            "cancelled", "run", "the process that started the runner is gone", "caller_died"
        ), 128 + 9
    number = end.signal or 15
    if end.reason == "signal" and (end.forced or code in (None, 128 + number)):
        return Outcome("cancelled", "run", f"ended by signal {number}", f"signal:{number}"), 128 + number
    if code is None and end.exit.signal is not None:
        cause = f"signal:{end.exit.signal}"
        return Outcome(
            "crashed", "run", f"the cage was killed by signal {end.exit.signal}", cause
        ), 128 + end.exit.signal
    if code is None:
        outcome = Outcome(
            "launch_failed",
            "launch",
            "bubblewrap could not start the program; its own message is above",
            "bubblewrap",
            "if it complains of the machine, runner doctor tells which layer is refused",
        )
        return outcome, EXEC_NO_CAGE
    if code == 0:
        return Outcome("ok", "run", "the plugin ended with status 0"), 0
    if code == _SIGSYS_STATUS:
        outcome = Outcome(
            "crashed",
            "run",
            "the plugin was killed for a system call of a foreign architecture",
            "seccomp",
            "build it for this machine",
        )
        return outcome, code
    if 128 < code <= 128 + 64:
        # bwrap folds "killed by n" and "returned 128+n" into one number; mostly the first is meant.
        return Outcome(
            "crashed", "run", f"the plugin was ended by signal {code - 128}", f"signal:{code - 128}"
        ), code
    return Outcome("crashed", "run", f"the plugin ended with status {code}", f"exit:{code}"), code


# --- report ---------------------------------------------------------------------------------------


def report(prepared: Prepared, outcome: Outcome, end: End | None, status: int) -> dict[str, Any]:
    """The document `--report` writes; its shape is report.v1.schema.json."""
    plugin = prepared.plugin
    return {
        "schema": SCHEMA,
        "runner": __version__,
        "plugin": None
        if plugin is None
        else {
            "id": plugin.id,
            "version": plugin.version,
            "contract": plugin.contract,
            "manifest": plugin.manifest,
        },
        "outcome": {
            "code": outcome.code,
            "phase": outcome.phase,
            "cause": outcome.cause,
            "message": outcome.message,
            "hint": outcome.hint,
        },
        "exit": {
            "status": status,
            "code": None if end is None else end.exit.code,
            "reached_exec": end is not None and end.exit.reached_exec,
            "ended_by": None if end is None else end.reason,
            "signal": None if end is None else end.signal,
            "forced": end is not None and end.forced,
        },
        "grant": _grant_document(prepared, outcome),
        "layers": [
            {
                "layer": layer.name,
                "requested": layer.requested,
                "effective": layer.effective,
                "detail": layer.detail,
            }
            for layer in described_layers(prepared)
        ],
        "timings": dict(prepared.timings.phases),
        "usage": None if end is None else end.exit.usage._asdict(),
        "diagnostics": [d._asdict() for d in _diagnostics(prepared, outcome)],
    }


def described_layers(prepared: Prepared) -> Iterator[Layer]:
    """The layers, with the filter named by its digest: only for whoever reads them, not for every launch."""
    for layer in prepared.layers:
        if layer.name == "seccomp" and not layer.degraded and prepared.open_plan is not None:
            layer = layer._replace(detail=seccomp.digest(prepared.open_plan.plan.layers.seccomp_filter))
        yield layer


def _diagnostics(prepared: Prepared, outcome: Outcome) -> tuple[Diagnostic, ...]:
    if outcome.diagnostics:
        return outcome.diagnostics
    return prepared.loaded.diagnostics if prepared.loaded is not None else ()


def _grant_document(prepared: Prepared, outcome: Outcome) -> dict[str, Any] | None:
    granted = prepared.grant
    if granted is None:
        return None
    plan = prepared.open_plan.plan if prepared.open_plan is not None else None
    denials = dict.fromkeys((*granted.denials, *outcome.denials))
    return {
        "policy": granted.policy,
        "unsandboxed": granted.unsandboxed,
        "paths": [shown._asdict() for shown in plan.shown] if plan is not None else [],
        "network": {"mode": granted.network.mode, "hosts": list(granted.network.hosts)},
        "env": [name for name, _ in (plan.env if plan is not None else granted.env)],  # never the values
        "seccomp": granted.seccomp,
        "limits": {
            name: value
            for name in granted.limits._fields
            if (value := getattr(granted.limits, name)) is not None
        },
        "decided_by": dict(granted.decided_by),
        "denials": [denial_document(prepared, denial) for denial in denials],
    }


def denial_document(prepared: Prepared, denial: Denial) -> dict[str, Any]:
    return {
        "rule": denial.rule,
        "asked": denial.asked,
        "reason": denial.reason,
        "hint": denial.hint,
        "required": denial.required,
        "where": place(prepared, denial),
    }


def place(prepared: Prepared, denial: Denial) -> str:
    """file:line:column of what was denied."""
    plugin = prepared.plugin
    if plugin is None:
        return ""
    line, column = position(plugin, denial.where) if denial.where else (0, 0)
    return f"{plugin.manifest}:{line}:{column}" if line else plugin.manifest
