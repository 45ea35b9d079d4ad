"""[plugin.supervisor] of a manifest: numbers as in the reference host, and what its supervisor publishes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.manifest.table import Table
from runner.plugin import Plugin
from runner.supervision import Supervision

# The reference host's numbers, in seconds.
STDERR_TAIL_LINES, MAX_ATTEMPTS, BACKOFF = 32, 3, 1.0
BACKOFF_MOST, HEALTHY_MOST = 60.0, 600.0

SOURCE = "plugin.supervisor"


def lifecycle(table: Table) -> tuple[tuple[str, float | str], ...]:
    """The table, as Plugin.lifecycle has it."""
    attempts, backoff_ms = table.integer("max_attempts"), table.integer("backoff_ms")
    lines = table.integer("stderr_tail_lines")
    found: tuple[tuple[str, float | str], ...] = (
        ("respawn", "yes" if table.flag("respawn", False) else "no"),
        ("stderr_tail_lines", float(STDERR_TAIL_LINES if lines is None else lines)),
    )
    if not table.flag("respawn", False):
        return found
    return (
        *found,
        ("max_attempts", float(MAX_ATTEMPTS if attempts is None else attempts)),
        ("backoff", BACKOFF if backoff_ms is None else backoff_ms / 1000),
    )


def supervision(plugin: Plugin) -> Supervision:
    """As the reference host: it starts all plugins, and supervises those that came up once. An exit with
    status 0 counts as a failure here: the plugin is gone, and nobody asked it to leave."""
    given = dict(plugin.lifecycle)
    backoff, attempts = float(given.get("backoff", BACKOFF)), int(given.get("max_attempts", MAX_ATTEMPTS))
    return Supervision(
        eager=True,
        respawn=given.get("respawn") == "yes",
        retry_first=False,
        backoff=backoff,
        backoff_most=max(backoff, BACKOFF_MOST),
        jitter=0.0,  # plugins are told the pause beforehand
        attempts=attempts,
        failures=0,
        healthy=min(backoff * attempts * 2, HEALTHY_MOST),
    )


def lifecycle_notice(
    plugin: Plugin, what: str, facts: Mapping[str, Any]
) -> tuple[str, Mapping[str, Any]] | None:
    payload: dict[str, Any] = {"plugin_id": plugin.id}
    tail = _tail(
        str(facts["stderr"]), int(dict(plugin.lifecycle).get("stderr_tail_lines", STDERR_TAIL_LINES))
    )
    match what:
        case "crashed":
            payload |= {"exit_code": facts["exit_code"], "stderr_tail": tail}
        case "respawning":
            payload |= {"attempt": facts["attempt"], "backoff_ms": _milliseconds(facts["seconds"])}
        case "respawned":
            uptime = _milliseconds(facts["total_uptime"])
            payload |= {"attempt": facts["attempt"], "total_uptime_ms": uptime}
        case "gave_up":
            if dict(plugin.lifecycle).get("respawn") != "yes":
                return None  # nothing was tried
            # The failure that ended it is not an attempt to start it.
            payload |= {"attempts": facts["attempt"] - 1, "last_exit_code": facts["exit_code"]}
            payload |= {"stderr_tail": tail}
        case "restarted":
            what = "restarted_manually"
            payload |= {"previous_uptime_ms": _milliseconds(facts["uptime"])}
            payload |= {"restarted_at_ms": _milliseconds(facts["time"]), "new_pid": facts["pid"]}
        case _:
            return None
    topic = f"plugin.lifecycle.{plugin.id}.{what}"
    return "broker.event", {"topic": topic, "event": {"source": SOURCE, "payload": payload}}


def _tail(stderr: str, lines: int) -> list[str]:
    kept = [line.strip() for line in stderr.splitlines() if line.strip()]
    return kept[-lines:] if lines else []


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
