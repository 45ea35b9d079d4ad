"""Events of an org, for hooks of its bindings. The ledger delivers them (runner/serve/deliveries.py).

An event goes to every active binding of the org whose export is a hook that wants its type: bindings of the
event's project, and those of the whole org. Where a project has a binding of its own for an export, that of
the org is left out. A rollout is decided by the id of each delivery, unless the event names a session or a
run. Ids of events belong to their org: the same id in another org is another event.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from runner.contracts.registry import find_contract
from runner.ledger.rows import Delivery, hook_id
from runner.serve.control.running import RunningBindings
from runner.serve.deliveries import delivery_of, type_of
from runner.serve.peer import ORG

_CONTEXT = ("project_id", "session_id", "chain_id", "run_id", "trace_id")
_KEYS = ("id", "org_id", "event", *_CONTEXT)


def read_event(document: Mapping[str, Any], org: str) -> tuple[Delivery, str]:
    """The event in the body of a request, without a hook yet, and its type. Raises ValueError."""
    if strays := sorted(document.keys() - {*_KEYS}):
        raise ValueError(f"the body has the unknown key {strays[0][:60]!a}; there are {', '.join(_KEYS)}")
    context: dict[str, Any] = {"org_id": org}
    for key in _CONTEXT:
        if (value := document.get(key)) is not None:
            if not isinstance(value, str) or not 0 < len(value) <= 256 or not value.isprintable():
                raise ValueError(f"{key}: it has to be a text of 1 to 256 printable characters")
            context[key] = value
    given = {key: document[key] for key in ("id", "event") if key in document}
    event = delivery_of({**given, "context": context})
    own = event._replace(id=event_id(org, event.id), poster=ORG + org)
    return own, type_of({"event": document["event"]})


def event_id(org: str, given: str) -> str:
    """The id of an org's event in the ledger, which has those of all orgs."""
    return f"evt_{hashlib.sha256(json.dumps([org, given]).encode()).hexdigest()[:32]}"


async def subscribers(running: RunningBindings, event: Delivery, kind: str) -> list[tuple[str, str]]:
    """Whom an event goes to: the names of bindings and their hooks. Raises DatabaseUnusable."""
    context = json.loads(event.context)
    found = []
    for live in await running.effective(context["org_id"], context.get("project_id"), "hooks"):
        contract, hook = find_contract(live.plugin.contract), live.row.export
        assert contract.bindings is not None  # or it would not be bound
        own = {**context, "delivery_id": hook_id(event.id, live.name, hook)}
        if (
            not live.inactive
            and hook in contract.hooks_for(live.plugin, kind)
            and contract.bindings.is_selected(live.row.id, own, live.row.traffic_percent)
        ):
            found.append((live.name, hook))
    return found
