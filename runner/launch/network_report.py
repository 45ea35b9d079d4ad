"""What a plugin did with its network: for the report, and for notes about a plugin that failed."""

from __future__ import annotations

from typing import Any

from runner.launch.advice.scene import RefusedHost
from runner.launch.stages import Stage, planned_of, started_of
from sandbox.document.diagnostic import quoted
from sandbox.network.audit import AuditLog
from sandbox.network.credentials import BrokerPlan
from sandbox.network.egress import LOOPBACK, NO_NETWORK, NOT_LISTED, OWN_LOOPBACK, AuditLine, EgressPlan
from sandbox.network.own_ports import served_ports
from sandbox.network.rules import LOCALHOST, parse_rule
from sandbox.policy.policy import is_loopback
from sandbox.spec import Note
from sandbox.speed.typed import Callable, Iterable

_RULE = "network"  # of the notes
_MOST_SHOWN = 5  # hosts in notes, of each kind

# In capitals: these networks have few or no restrictions.
NETWORK_WARNINGS = {
    "host": "THIS PLUGIN HAS THE HOST'S OWN NETWORK: every host, every port, and all that listens on "
    "localhost. Nothing is checked or recorded",
    "open": "THIS PLUGIN REACHES EVERY HOST BY NAME, ON EVERY PORT, except this machine and link-local "
    "addresses",
}
_LESS = 'to allow less, set ceiling = "allowlist" under [network] in the policy and list hosts'

_LISTS = {"connect": "connections", "dns": "questions", "request": "requests", "ssh": "ssh"}
_OF_REQUESTS = ("method", "path", "status", "credential")
# What the lines of each other kind do not have.
_NOT_OF = {
    "request": ("address", "times"),
    "ssh": (*_OF_REQUESTS, "port", "address", "sent", "received", "seconds"),
}


def network_document(stage: Stage | None) -> dict[str, Any] | None:
    """The network part of the report; None if the plugin had no gate and asked for no host."""
    planned, started = planned_of(stage), started_of(stage)
    log = started.audit if started is not None else None
    if planned is None or (planned.plan.egress is None and (log is None or not log.totals)):
        return None
    egress = planned.plan.egress
    lines = () if log is None else log.lines
    return {
        "mode": planned.grant.network.mode,
        "rules": [] if egress is None else [*egress.rules, *_request_rules(egress)],
        "credentials": [] if egress is None or egress.broker is None else _credentials(egress.broker),
        **{
            name: [line_document(line) for line in lines if line.kind == kind]
            for kind, name in _LISTS.items()
        },
        "totals": {} if log is None else _totals(log),
        "left_out": 0 if log is None else sum(log.left_out.values()),
        "dropped": 0 if log is None else log.dropped,
        "gate_ended_early": log is not None and log.gate_ended_early,
    }


def line_document(line: AuditLine) -> dict[str, Any]:
    document = line._asdict()
    del document["kind"]
    for field in _NOT_OF.get(line.kind, _OF_REQUESTS):
        del document[field]
    return document


def _request_rules(egress: EgressPlan) -> tuple[str, ...]:
    return () if egress.broker is None else egress.broker.requests


def _credentials(broker: BrokerPlan) -> list[dict[str, Any]]:
    return [
        {"name": each.name, "hosts": list(each.hosts), "where": list(each.where)}
        for each in broker.credentials
    ]


def _totals(log: AuditLog) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {name: {} for name in _LISTS.values()}
    for (kind, verdict), count in log.totals.items():
        found[_LISTS[kind]][verdict] = count
    return found


def network_notes(stage: Stage | None) -> list[Note]:
    planned = planned_of(stage)
    mode = "none" if planned is None else planned.grant.network.mode
    shouted = [Note(f"network_{mode}", NETWORK_WARNINGS[mode], _LESS)] if mode in NETWORK_WARNINGS else []
    return [*shouted, *gate_end(stage), *unreached_hosts(stage)]


def gate_end(stage: Stage | None) -> list[Note]:
    """Notes about a gate that has ended early."""
    started = started_of(stage)
    log = started.audit if started is not None else None
    if log is None or not log.gate_ended_early:
        return []
    message = f"the gate, the process that makes its connections, {log.describe_end()}"
    hint = "run it again; if memory was short, see the kernel's log (dmesg) for what was killed"
    return [Note(_RULE, message, hint)]


def refused_hosts(stage: Stage | None) -> tuple[RefusedHost, ...]:
    """The hosts that were refused, for advice about a plugin that has failed."""
    started = started_of(stage)
    log = started.audit if started is not None else None
    if log is None:
        return ()
    told = filter(told_of_loopback(), _refused(log.lines))
    return tuple(dict.fromkeys(map(refused_host, told)))[:_MOST_SHOWN]


def unreached_hosts(stage: Stage | None) -> list[Note]:
    """Notes about allowed hosts that could not be reached, for a plugin that has failed."""
    started = started_of(stage)
    log = started.audit if started is not None else None
    if log is None:
        return []
    # Hosts that were reached at another time did not cause the failure.
    reached = {(line.name, line.port) for line in log.lines if line.verdict == "allowed" and line.address}
    found = {
        (line.name, line.port): failed_host(line).message
        for line in log.lines
        if line.verdict == "failed" and (line.name, line.port) not in reached
    }
    told = [Note(_RULE, message) for message in found.values()]
    more = f"{len(told) - _MOST_SHOWN} more hosts were allowed and not reached; the report names them"
    if not _names_all_failed(log):
        all_failed = f"{_count_failed(log)} connections were allowed and failed in all"
        more = f"{all_failed}; the report names some of them"
    return told[:_MOST_SHOWN] + ([Note(_RULE, more)] if len(told) > _MOST_SHOWN else [])


def failed_host(line: AuditLine) -> RefusedHost:
    if line.kind == "ssh":
        return _of_agent(line)
    how = "failed" if line.kind == "request" else "not reached"
    return RefusedHost(f"{_address(line)} was allowed and {how}: it {line.reason}")


def _names_all_failed(log: AuditLog) -> bool:
    """Whether the report names every host that was not reached. If not, their number is not known."""
    return not log.left_out["failed"] and not log.dropped


def _count_failed(log: AuditLog) -> int:
    """How many connections failed, including those without a line."""
    return sum(count for (_, verdict), count in log.totals.items() if verdict == "failed")


def _address(line: AuditLine) -> str:
    return f"[{line.name}]:{line.port}" if ":" in line.name else f"{line.name}:{line.port}"


def _refused(lines: Iterable[AuditLine]) -> list[AuditLine]:
    found = [line for line in lines if line.verdict == "refused"]
    # A connection says more than the DNS question before it.
    dialled = {line.name for line in found if line.kind == "connect"}
    return [line for line in found if line.kind == "connect" or line.name not in dialled]


def told_of_loopback() -> Callable[[AuditLine], bool]:
    """Whether people are told of a line. Programs wait on their own loopback for servers of their own, so of
    its ports only those count that this machine serves."""
    served: frozenset[int] | None = None

    def is_told(line: AuditLine) -> bool:
        nonlocal served
        if line.reason != OWN_LOOPBACK:
            return True
        if served is None:
            served = served_ports()
        return line.name in LOOPBACK and line.port in served

    return is_told


def _of_agent(line: AuditLine) -> RefusedHost:
    about = f", for {line.name}" if line.name else ""
    return RefusedHost(f"the plugin's ssh agent {line.reason}{about}")


def refused_host(line: AuditLine) -> RefusedHost:
    if line.kind == "ssh":
        return _of_agent(line)
    if line.kind == "request":
        told = f"{line.method} {quoted(line.path)} of {_address(line)}"
        return RefusedHost(f"the plugin made the request {told}, which was refused: it {line.reason}")
    if line.kind == "connect":
        message = f"the plugin asked for {_address(line)}, which was refused: it {line.reason}"
        if line.reason == OWN_LOOPBACK:
            own = f"{LOCALHOST}:{line.port}"
            message = (
                f"the plugin asked for {own}, which is its own loopback, and this machine serves that port"
            )
            return RefusedHost(message, _rule(own))
        return RefusedHost(message, _rule(_address(line)) if line.reason == NOT_LISTED else "")
    rule = _rule(f"{line.name}:443")
    # The plugin may have chosen any text for a name, also one that reads like a sentence of ours.
    asked = f"the plugin asked for the host {line.name if rule else quoted(line.name)}"
    if rule and is_loopback(rule):
        rule = ""  # which port it wanted is not known, and this machine may have a server on 443
    if line.reason == NO_NETWORK:
        return RefusedHost(f"{asked}, and it has no network", rule)
    if line.reason != NOT_LISTED:  # no entry of the list would allow it
        return RefusedHost(f"{asked}, which was refused: it {line.reason}")
    return RefusedHost(f"{asked}, which {NOT_LISTED}", rule)


def _rule(text: str) -> str:
    """The entry of an allowlist for this host and port; '' for a name that no list can have."""
    try:
        return str(parse_rule(text))
    except ValueError:
        return ""
