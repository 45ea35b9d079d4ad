"""The requests that a kaged plugin may send to its host: storage. Our extension of the contract, which names
the capabilities only.

Both the operator and the manifest must allow a method: the policy with `host` under [capabilities], and the
manifest with the capability. docs/kaged.md has the requests, the answers and the errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runner.contracts.kaged.declared import STORAGE_READ, STORAGE_WRITE
from runner.contracts.kaged.host_methods import DELETE, GET, LIST, METHODS, SET
from runner.contracts.kaged.storage import BUSY, DENIED, SqliteStore, key_fault
from runner.plugin import Plugin
from runner.protocol.dialect import Answer
from runner.protocol.host_services import Emit, HostError, KeyValueStore, Services, Why
from runner.protocol.jsonrpc import INVALID_PARAMS, METHOD_NOT_FOUND
from sandbox.document.diagnostic import quoted

NEEDED: Mapping[str, str] = {GET: STORAGE_READ, LIST: STORAGE_READ, SET: STORAGE_WRITE, DELETE: STORAGE_WRITE}

# Method -> its parameters, and whether each must be there.
PARAMS: Mapping[str, Mapping[str, bool]] = {
    GET: {"key": True},
    SET: {"key": True, "value": True},
    DELETE: {"key": True},
    LIST: {"prefix": False, "after": False, "limit": False},
}
PAGE_DEFAULT, PAGE_MOST = 100, 1000  # keys in one answer


class StorageMethods:
    """The storage requests of a plugin with these capabilities in its manifest."""

    METHODS = METHODS

    def __init__(self, capabilities: Sequence[str]) -> None:
        self._capabilities = frozenset(capabilities)

    async def serve(self, method: str, params: Any, services: Services, emit: Emit) -> Any:
        store = services.storage
        if store is None or NEEDED[method] not in self._capabilities:
            error = self.refused(method, "absent").error
            assert error is not None
            raise HostError(*error)
        return await _serve(method, _check_params(method, params), store)

    def refused(self, method: str, why: Why) -> Answer:
        needed = NEEDED.get(method)
        if needed is None:
            return Answer(error=(METHOD_NOT_FOUND, f"method not found: {quoted(method)}", None))
        if needed not in self._capabilities:
            reason = f"the manifest does not declare {needed} under capabilities"
            return _denied({"capability": needed, "reason": reason})
        if why == "denied":
            reason = f"the policy does not allow {method}: see host under [capabilities]"
            return _denied({"policy": "capabilities.host", "reason": reason})
        if why == "busy":
            reason = "too many requests at once: wait for the answers to some"
            return Answer(error=(BUSY, "busy", {"reason": reason}))
        reason = "there is no storage: the plugin has no state directory"
        return Answer(error=(METHOD_NOT_FOUND, f"method not found: {method}", {"reason": reason}))


def provide(plugin: Plugin, services: Services, state_dir: str | None) -> Services:
    """Add the storage to the services: the caller's own, else one beside the state directory. No storage for
    a plugin that may not use it, so that it is not offered."""
    if not {STORAGE_READ, STORAGE_WRITE} & set(plugin.capabilities):
        return services._replace(storage=None)
    if services.storage is not None or state_dir is None:
        return services
    return services._replace(storage=SqliteStore(state_dir))


def _denied(data: Mapping[str, str]) -> Answer:
    return Answer(error=(DENIED, "capability_denied", dict(data)))


def _check_params(method: str, params: Any) -> Mapping[str, Any]:
    """The parameters of a request, without faults. Raises HostError."""
    known = PARAMS[method]
    given = {} if params is None else params
    if not isinstance(given, Mapping):
        raise _invalid("they must be an object")
    if stray := [name for name in given if name not in known]:
        raise _invalid(f"there is no parameter {quoted(stray[0])}; known are {', '.join(known)}")
    if missing := [name for name, needed in known.items() if needed and name not in given]:
        raise _invalid(f"{missing[0]} is missing")
    for name in ("key", "prefix", "after"):
        if name in given and (fault := key_fault(given[name], name, may_be_empty=name != "key")):
            raise _invalid(fault)
    limit = given.get("limit", PAGE_DEFAULT)
    if type(limit) is not int or not 1 <= limit <= PAGE_MOST:
        raise _invalid(f"limit must be an integer from 1 to {PAGE_MOST}")
    return given


async def _serve(method: str, given: Mapping[str, Any], store: KeyValueStore) -> dict[str, Any]:
    if method == GET:
        try:
            return {"value": await store.get(given["key"]), "found": True}
        except KeyError:
            return {"value": None, "found": False}
    if method == SET:
        await store.set(given["key"], given["value"])
        return {}
    if method == DELETE:
        return {"deleted": bool(await store.delete(given["key"]))}
    limit = given.get("limit", PAGE_DEFAULT)
    # One more than asked for, to learn whether there are more.
    keys = list(await store.list(given.get("prefix", ""), given.get("after", ""), limit + 1))
    return {"keys": keys[:limit], "more": len(keys) > limit}


def _invalid(reason: str) -> HostError:
    return HostError(INVALID_PARAMS, f"invalid params: {reason}")
