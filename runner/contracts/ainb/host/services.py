"""The requests that an ainb plugin may send to its host, and the topics it is told about.

Both the operator and the manifest must allow a method: the policy with `host` under [capabilities], and the
manifest with the capability in NEEDED. docs/ainb.md has the requests, the answers and the bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import trio

from runner.contracts.ainb.declared import Declared, declared_by
from runner.contracts.ainb.host.files import GuardedFiles, common_roots
from runner.contracts.ainb.host.network import GuardedFetcher, common_rules
from runner.contracts.ainb.host.params import (
    ACTION_TIMEOUT,
    ACTIVE,
    CLOSE,
    CREATE,
    DELETE,
    DIAL,
    FETCH,
    FIELDS,
    FS_CAPABILITY,
    GET,
    INVOKE,
    LOG,
    MANIFEST_VALIDATION,
    NOT_IMPLEMENTED,
    NOTIFICATIONS,
    PUBLISH,
    READ_DIR,
    READ_FILE,
    SECRET,
    SEND,
    SET_ACTIVE,
    SET_DEFAULT,
    SPAWN,
    STREAM,
    STREAM_CANCEL,
    SUBSCRIBE,
    WORKSPACE_CREATION_DISABLED,
    WORKSPACES,
    check_params,
    denied,
    invalid,
)
from runner.contracts.ainb.host.snapshots import SnapshotClient
from runner.contracts.ainb.host.sockets import UnixSockets
from runner.contracts.ainb.host_methods import METHODS
from runner.contracts.ainb.payload import decode, encode
from runner.contracts.ainb.terms import ACTION_SECONDS
from runner.plugin import Allowance, Plugin
from runner.protocol.bus import PAYLOAD_MOST_BYTES, BusRefused, Handler, Room, SnapshotBus
from runner.protocol.dialect import Answer, Call, Notice
from runner.protocol.host_services import Ask, Emit, HostError, Services, Tell, Why
from runner.protocol.jsonrpc import INTERNAL_ERROR, METHOD_NOT_FOUND
from runner.protocol.memory import size_of
from sandbox import surroundings
from sandbox.document.diagnostic import quoted

# Method -> the capability that the manifest must have. Those of host/fs/* are in files.py; the others need
# none.
NEEDED: Mapping[str, str] = {
    **dict.fromkeys((GET, PUBLISH, SUBSCRIBE, INVOKE), "event_bus"),
    FETCH: "network",
    STREAM: "event_stream_subscribe",
    SPAWN: "spawn_managed_subprocess",
    DIAL: "unix_socket_dial",
    SECRET: "secrets:read",
    **dict.fromkeys((SET_ACTIVE, SET_DEFAULT, CREATE, DELETE), "workspace:write"),
}

# Capabilities that mean nothing but the right to use their methods.
_BY_POLICY = ("event_bus", "event_stream_subscribe", "workspace:write")

_NAME_MOST = 200  # characters of a plugin's word in a message
_REASON_MOST = 4096  # characters of a notice's reason


class AinbMethods:
    """The host methods of one session."""

    METHODS = METHODS
    # Separate queues, so that quick requests do not wait for slow ones.
    LONG: Mapping[str, tuple[str, int]] = {
        **dict.fromkeys((GET, READ_DIR, READ_FILE), ("read", 1)),
        FETCH: ("fetch", 1),
        INVOKE: ("invoke", 2),
    }

    def __init__(self, plugin: Plugin, allowance: Allowance) -> None:
        self._id = plugin.id
        self._denied = allowance.denied
        self._declared = declared_by(plugin)
        self._services = Services()
        self._allows: Callable[[str], bool] = lambda _: False
        self._ask: Ask | None = None
        self._snapshots: SnapshotClient | None = None
        self._sockets: UnixSockets | None = None
        self._drops: dict[str, int] = {}  # notifications that were dropped, by reason
        self._serve: Mapping[str, Callable[[Mapping[str, Any], Services], Any]] = {
            INVOKE: self._invoke,
            READ_DIR: self._read_dir,
            READ_FILE: self._read_file,
            FETCH: self._fetch,
            DIAL: self._dial,
            SPAWN: self._spawn,
            SECRET: self._secret,
            WORKSPACES: self._list_workspaces,
            ACTIVE: self._active_workspace,
            SET_ACTIVE: self._choose_workspace,
            SET_DEFAULT: self._choose_workspace,
            DELETE: self._choose_workspace,
            CREATE: self._create_workspace,
        }

    # --- the session ----------------------------------------------------------------------------------------

    def connect(self, services: Services, allows: Callable[[str], bool], ask: Ask) -> None:
        self._services, self._allows, self._ask = services, allows, ask

    def attach(self, tell: Tell, room: Room) -> None:
        listed = self._declared.lists.get(NEEDED[DIAL])
        self._sockets = UnixSockets(listed, surroundings.variables(), tell, room, self._denied)
        bus = self._services.bus
        if bus is None:
            return
        self._snapshots = client = SnapshotClient(bus, self._id, self._declared, tell, room)
        if self._declared.allows("event_bus") and self._allows(SUBSCRIBE):
            client.subscribe_declared()
        if self._ask is not None:
            client.member.actions = actions_of(self._declared, self._ask)

    async def published(self) -> None:
        if self._snapshots is not None:
            await self._snapshots.published()

    def detach(self) -> None:
        client, self._snapshots = self._snapshots, None
        if client is not None:
            client.close()
        sockets, self._sockets = self._sockets, None
        if sockets is not None:
            sockets.close_all()

    # --- notifications --------------------------------------------------------------------------------------

    def note(self, method: str, params: Any, services: Services) -> Sequence[Notice]:
        if method not in NOTIFICATIONS:
            return ()
        given = check_params(method, params)
        needed = NEEDED.get(method)
        if needed is not None and not self._declared.allows(needed):
            raise denied(needed)
        if method == LOG:
            lowest = services.log_level or DEFAULT_LEVEL
            notice = log_notice(self._id, lowest, given["level"], given["message"], given["fields"])
            return () if notice is None else (notice,)
        self._act(method, given)
        return ()

    def _act(self, method: str, given: Mapping[str, Any]) -> None:
        if self._snapshots is not None and method == PUBLISH:
            self._snapshots.publish(given["topic"], given["payload"])
        elif self._snapshots is not None and method == STREAM_CANCEL:
            self._snapshots.cancel(given["stream_id"])
        elif self._sockets is not None and method == SEND:
            self._sockets.send(given["stream_id"], given["bytes"])
        elif self._sockets is not None and method == CLOSE:
            self._sockets.close(given["stream_id"])

    def ignored(self, method: str, why: Why, reason: str = "") -> Sequence[Notice]:
        if why == "unknown" or method not in NOTIFICATIONS:
            return ()
        by_policy = f"the policy does not allow {method}: see host under [capabilities]"
        return self._dropped(method, reason or by_policy)

    def _dropped(self, method: str, reason: str) -> Sequence[Notice]:
        """A notice for the first, second, fourth, eighth, … drop, so that notices do not crowd out other
        events."""
        count = self._drops[method] = self._drops.get(method, 0) + 1
        if count & (count - 1):
            return ()
        return (Notice("dropped", {"method": method, "reason": reason[:_REASON_MOST], "count": count}),)

    # --- requests -------------------------------------------------------------------------------------------

    async def serve(self, method: str, params: Any, services: Services, emit: Emit) -> Any:
        if method in NOTIFICATIONS:
            raise _unknown(method)
        given = check_params(method, params)
        needed = NEEDED.get(method)
        if needed is not None and not self._declared.allows(needed):
            raise denied(needed)
        client = self._snapshots
        if method in (GET, SUBSCRIBE, STREAM):
            if client is None:
                raise HostError(INTERNAL_ERROR, "the session is over")
            if method == GET:
                return client.get(given["topic"])
            if method == SUBSCRIBE:
                return client.subscribe(given["topic"])
            return client.open_stream(given["topic"])
        return await self._serve[method](given, services)

    def refused(self, method: str, why: Why) -> Answer:
        if why == "unknown" or method not in FIELDS:
            error = _unknown(method)
        elif why == "busy":
            error = HostError(INTERNAL_ERROR, "the host is busy: wait for the answers to some requests")
        elif why == "absent":
            error = HostError(NOT_IMPLEMENTED, f"not implemented: {method}")
        else:
            capability = NEEDED.get(method) or (FS_CAPABILITY if method in (READ_DIR, READ_FILE) else method)
            reason = f"the policy does not allow {method}: see host under [capabilities]"
            error = denied(capability, reason=reason)
        return Answer(error=(error.code, str(error), error.data))

    # --- actions --------------------------------------------------------------------------------------------

    async def _invoke(self, given: Mapping[str, Any], services: Services) -> dict[str, Any]:
        action: str = given["action"]
        shown = quoted(action[:_NAME_MOST])
        if self._snapshots is None or services.bus is None:
            raise HostError(INTERNAL_ERROR, "the session is over")
        try:
            found = services.bus.find_action(action)
            if found is None:
                raise invalid(f"there is no action {shown}")
            handler, plugin = found
            if plugin == self._id:
                # It is busy with this very request, and may not read the next one before this is answered.
                raise invalid(f"the plugin itself does the action {shown}")
            waiting = nullcontext() if plugin is None else services.bus.awaited(plugin, self._id)
            with waiting:
                return await _act_in_time(handler, given)
        except BusRefused as refused:
            raise invalid(f"the action {shown} cannot be invoked: {refused}") from None

    # --- files and network ----------------------------------------------------------------------------------

    async def _read_dir(self, given: Mapping[str, Any], services: Services) -> dict[str, Any]:
        assert services.files is not None
        entries = await services.files.read_dir(given["path"])
        return {
            "entries": [{"name": each.name, "is_dir": each.is_dir, "size": each.size} for each in entries]
        }

    async def _read_file(self, given: Mapping[str, Any], services: Services) -> dict[str, Any]:
        assert services.files is not None
        return {"bytes": encode(await services.files.read_file(given["path"]))}

    async def _fetch(self, given: Mapping[str, Any], services: Services) -> dict[str, Any]:
        if services.fetcher is None:
            raise HostError(
                NOT_IMPLEMENTED,
                "not implemented: the policy allows no host: see ceiling and hosts under [network]",
            )
        fetched = await services.fetcher.fetch(
            given["url"], given["method"] or "GET", given["headers"], given["body"]
        )
        headers = [[name, value] for name, value in fetched.headers]
        return {"status": fetched.status, "headers": headers, "body": encode(fetched.body)}

    async def _dial(self, given: Mapping[str, Any], services: Services) -> dict[str, Any]:
        if self._sockets is None:
            raise HostError(INTERNAL_ERROR, "the session is over")
        return dict(await self._sockets.dial(given["path"]))

    # --- what this host does not do -------------------------------------------------------------------------

    async def _spawn(self, given: Mapping[str, Any], services: Services) -> dict[str, Any]:
        programs = self._declared.lists.get(NEEDED[SPAWN])
        if programs is None:
            raise HostError(MANIFEST_VALIDATION, f"{NEEDED[SPAWN]} must be a list of programs, not true")
        if given["bin"] not in programs:
            raise denied(NEEDED[SPAWN], bin=given["bin"])
        raise HostError(
            NOT_IMPLEMENTED,
            "not implemented: a program outside of the plugin's cage is not started; start it in the cage",
        )

    async def _secret(self, given: Mapping[str, Any], services: Services) -> dict[str, Any]:
        keys = self._declared.lists.get(NEEDED[SECRET])
        if keys is not None and given["key"] not in keys:
            raise denied(NEEDED[SECRET], key=given["key"])
        raise HostError(NOT_IMPLEMENTED, "not implemented: this host has no secret store")

    async def _list_workspaces(self, given: Mapping[str, Any], services: Services) -> dict[str, Any]:
        return {"workspaces": [], "creation_disabled": True}

    async def _active_workspace(self, given: Mapping[str, Any], services: Services) -> dict[str, Any]:
        return {"workspace_id": None}

    async def _choose_workspace(self, given: Mapping[str, Any], services: Services) -> dict[str, Any]:
        raise invalid(f"there is no workspace {quoted(given['workspace_id'][:_NAME_MOST])}")

    async def _create_workspace(self, given: Mapping[str, Any], services: Services) -> dict[str, Any]:
        raise HostError(
            WORKSPACE_CREATION_DISABLED, "workspace creation disabled: this host has no workspaces"
        )


async def _act_in_time(handler: Handler, given: Mapping[str, Any]) -> dict[str, Any]:
    asked = given["timeout_ms"] / 1000
    with trio.move_on_after(min(asked, ACTION_SECONDS) if asked else ACTION_SECONDS):
        result = await handler(given["payload"])
        if len(result) > PAYLOAD_MOST_BYTES:
            raise HostError(INTERNAL_ERROR, f"the result has more than {PAYLOAD_MOST_BYTES} bytes")
        return {"payload": encode(result)}
    raise HostError(ACTION_TIMEOUT, f"action timed out: {given['action'][:_NAME_MOST]}")


def actions_of(declared: Declared, ask: Ask) -> Mapping[str, Handler]:
    """What other plugins may invoke of one, by name. `ask` calls it."""

    def action(name: str) -> Handler:
        async def handler(payload: bytes) -> bytes:
            answer = await ask(Call("action", name, payload))
            return _payload_of(answer["payload"])

        return handler

    return {name: action(name) for name in declared.cli_namespaces}


def provide(plugin: Plugin, services: Services, allowance: Allowance) -> Services:
    """Add the runner's own services where the host has none. The host's own files and network get the same
    guards as the runner's."""
    declared = declared_by(plugin)
    fetcher = None
    if allowance.hosts:
        rules = common_rules(declared.lists.get(NEEDED[FETCH]), allowance.hosts)
        fetcher = GuardedFetcher(rules, services.fetcher)
    return services._replace(
        bus=services.bus if services.bus is not None else SnapshotBus(),
        log_level=check_level(services.log_level or DEFAULT_LEVEL),
        files=GuardedFiles(
            declared=declared.fs_roots,
            granted=allowance.readable,
            writable=allowance.writable,
            denied=allowance.denied,
            own=services.files,
            flags=declared.folders,
        ),
        fetcher=fetcher,
    )


def granted(plugin: Plugin, allowance: Allowance, allows: Callable[[str], bool]) -> tuple[str, ...]:
    """The capabilities of the manifest that it has here: what the policy leaves of them, and this host
    serves. `allows`: whether the policy allows a method."""
    declared = declared_by(plugin)
    hosts = common_rules(declared.lists.get(NEEDED[FETCH]), allowance.hosts)
    here: dict[str, bool] = {
        "write_plugin_data": allowance.state_dir in allowance.readable,
        "spawn_subprocess": True,
        NEEDED[FETCH]: allowance.network != "none" or (bool(hosts) and allows(FETCH)),
        NEEDED[DIAL]: NEEDED[DIAL] in declared.lists and allows(DIAL),
        FS_CAPABILITY: bool(common_roots(_folders(declared), allowance.readable)),
    }
    here |= {flag: bool(common_roots([folder], allowance.readable)) for flag, folder in declared.folders}
    here |= {NEEDED[method]: True for method in NEEDED if NEEDED[method] in _BY_POLICY and allows(method)}
    return tuple(name for name in declared.granted if here.get(name))


def _folders(declared: Declared) -> tuple[str, ...]:
    """Those of read_paths."""
    flags = [folder for name, folder in declared.folders if declared.allows(name)]
    return declared.fs_roots[len(flags) :]


def _payload_of(value: Any) -> bytes:
    """The dialect gives bytes as text where they are UTF-8 (calls.py)."""
    return value.encode() if isinstance(value, str) else decode(value["base64"])


def _unknown(method: str) -> HostError:
    return HostError(METHOD_NOT_FOUND, f"method not found: {method[:_NAME_MOST]}")


# --- host/log: an event of the session, from the lowest level on --------------------------------------------

LEVELS = ("trace", "debug", "info", "warn", "error")
DEFAULT_LEVEL = "warn"

MESSAGE_MOST = 4096  # characters; the rest is cut off
_SHOWN_CHARACTERS = 40  # of an unknown level
FIELDS_MOST_BYTES = 8 << 10  # in memory; larger fields are left out


def check_level(level: str) -> str:
    """Check Services.log_level. Raises ValueError."""
    if level not in (*LEVELS, "off"):
        raise ValueError(f"the log level {level!r} is none of {', '.join(LEVELS)}, off")
    return level


def log_notice(plugin_id: str, lowest: str, level: str, message: str, fields: Any) -> Notice | None:
    """None: the host does not want it. Raises HostError if there is no such level."""
    if level not in LEVELS:
        raise invalid(f"there is no log level {quoted(level[:_SHOWN_CHARACTERS])}")
    if lowest == "off" or LEVELS.index(level) < LEVELS.index(lowest):
        return None
    value: dict[str, Any] = {"plugin": plugin_id, "level": level, "message": message[:MESSAGE_MOST]}
    if len(message) > MESSAGE_MOST:
        value["cut"] = len(message) - MESSAGE_MOST
    if fields is not None:
        size = size_of(fields)
        if size is not None and size <= FIELDS_MOST_BYTES:
            value["fields"] = fields
        else:
            value["fields_left_out"] = True
    return Notice("log", value)
