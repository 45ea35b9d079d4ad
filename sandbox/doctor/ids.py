"""Check the uids for plugins: whether others use them, and how many are left."""

from __future__ import annotations

import os

from sandbox.doctor.finding import Finding
from sandbox.files import colon_fields
from sandbox.identity.reservations import list_reservations
from sandbox.identity.uid_range import DYNAMIC_USER_RANGE, id_is_mapped
from sandbox.identity.uids import is_leased, occupancy

_NEARLY_FULL = 0.9


def uid_range(uid: int, first: int, last: int) -> list[Finding]:
    """Find other users of the range. No plugin is given a uid in use, but its files may have one."""
    if uid != 0:
        return []
    if taken := [*accounts_within(first, last), *accounts_within(first, last, "/etc/group")]:
        return [
            Finding(
                "uid_range",
                "degraded",
                f"uids {first}-{last} for plugins contain accounts of this machine: {', '.join(taken)}",
                "no plugin is given one of these uids",
                "choose a range without accounts with [user] uids in the policy",
            )
        ]
    if shared := subordinate_within(first, last):
        return [
            Finding(
                "uid_range",
                "degraded",
                f"uids {first}-{last} for plugins are also given to containers of {', '.join(shared)} "
                "(/etc/subuid)",
                "the owner of such a range can become any uid in it",
                "remove [user] uids from the policy to use the default range, or choose a range that "
                "nobody else has",
            )
        ]
    if first <= DYNAMIC_USER_RANGE[1] and last >= DYNAMIC_USER_RANGE[0] and _may_meet_services():
        return [
            Finding(
                "uid_range",
                "degraded",
                f"uids {first}-{last} for plugins are also used by systemd for services with DynamicUser=",
                "a launch skips a uid that a service has, but a service that starts later may get the "
                "uid of a plugin",
                "remove [user] uids from the policy to use the default range; in a container, map "
                "2147483648 ids",
            )
        ]
    return [Finding("uid_range", "ok", f"uids {first}-{last} are used by plugins only")]


def _may_meet_services() -> bool:
    """False in a container with its own user namespace: it shares no uids with services of the host."""
    return os.path.exists("/run/systemd/system") or id_is_mapped(0, 4294967294)


def uid_pool(uid: int, first: int, last: int) -> list[Finding]:
    if uid != 0:
        return []
    full = occupancy(first, last)
    summary = (
        f"{full.reserved} of {full.for_states} uids for plugins with state are reserved, "
        f"{full.running} of {full.for_others} uids for plugins without state are in use"
    )
    if full.elsewhere:
        summary += f"; {full.elsewhere} states have uids outside of this range"
    if full.reserved >= full.for_states * _NEARLY_FULL:
        return [
            Finding(
                "uid_pool",
                "degraded",
                summary,
                "when none is left, a plugin that asks for state for the first time is not started",
                "remove states that nobody needs (runner state remove --orphaned, runner state remove NAME), "
                "or widen [user] uids in the policy",
                "reservations",
            )
        ]
    old = [
        each.uid
        for each in list_reservations()
        if DYNAMIC_USER_RANGE[0] <= each.uid <= DYNAMIC_USER_RANGE[1] and not first <= each.uid <= last
    ]
    running = sum(map(is_leased, old))
    detail = (
        f"{len(old)} states of an earlier version ({running} running) have uids that systemd may also "
        "give to a "
        "service (DynamicUser=); such a plugin cannot start while a service has its uid"
        if old
        else ""
    )
    return [Finding("uid_pool", "ok", summary, detail)]


def accounts_within(first: int, last: int, path: str = "/etc/passwd") -> list[str]:
    """Accounts with uids in the range."""
    return [
        f"{fields[0]} ({fields[2]})"
        for fields in colon_fields(path)
        if len(fields) > 2 and fields[2].isdecimal() and first <= int(fields[2]) <= last
    ]


def subordinate_within(first: int, last: int, path: str = "/etc/subuid") -> list[str]:
    return [
        fields[0]
        for fields in colon_fields(path)
        if len(fields) == 3
        and fields[1].isdecimal()
        and fields[2].isdecimal()
        and int(fields[1]) <= last
        and int(fields[1]) + int(fields[2]) > first
    ]
