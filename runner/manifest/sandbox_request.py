"""A manifest's requests for the cage, read and checked in the same way for every contract.

The checks read only the text, not files or the policy. So a manifest means the same on every machine, except
for the user's home, and the result can be cached. Files and the policy are checked later.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runner.manifest.table import Item, Table
from sandbox.document import model
from sandbox.document.diagnostic import did_you_mean, quoted
from sandbox.document.faults import Faults
from sandbox.network import ssh as ssh_access
from sandbox.network.credentials import parse_hiding, signs
from sandbox.network.rules import HostRule, covers, parse_rule, ports_fault
from sandbox.paths.denied_paths import DENYLIST_RULE, lexical_hit
from sandbox.policy.policy import FRACTIONAL_LIMITS
from sandbox.spec import (
    ARGUMENT_LIMIT,
    STATE_DIR_TOKEN,
    KeyPath,
    Limits,
    Network,
    PathRequest,
    SeccompProfile,
    is_variable_name,
)
from sandbox.speed.value import NamedTuple
from sandbox.units import parse_limit

# Bytes. The kernel limits arguments and variables together to a quarter of the stack limit: 2 MiB by default,
# of which bubblewrap's own arguments take a part.
VECTOR_LIMIT = 512 << 10
PATH_LIMIT = 4096 - 1  # bytes
NAME_LIMIT = 255  # bytes of one segment of a path, characters of a variable's name

Where = tuple[tuple[str, KeyPath], ...]  # name of a request -> the keys that lead to it


def check_vector(
    faults: Faults, command: Item | None, args: Sequence[Item], env: Sequence[tuple[str, Item]]
) -> None:
    """Check that execve() will accept the arguments and variables."""
    total = 0
    for item in (*([command] if command else ()), *args):
        size = len(os.fsencode(item.text))
        total += size + 9  # the terminating NUL and a pointer
        if size > ARGUMENT_LIMIT:
            message = f"an argument has {size} bytes; the kernel takes at most {ARGUMENT_LIMIT}"
            faults.error(item.keys, "argument_too_long", message)
    for name, item in env:
        size = len(os.fsencode(name)) + 1 + len(os.fsencode(item.text))
        total += size + 9
        check_env_name(faults, item.keys, name)
        if size > ARGUMENT_LIMIT:
            message = f"a variable has {size} bytes; the kernel takes at most {ARGUMENT_LIMIT}"
            faults.error(item.keys, "argument_too_long", message)
    if total > VECTOR_LIMIT:
        keys = command.keys[:-1] if command else ()
        message = f"arguments and variables together have {total} bytes; the limit is {VECTOR_LIMIT}"
        faults.error(keys, "arguments_too_long", message)


def own_state(words: Iterable[Item]) -> tuple[PathRequest, ...]:
    """The request for ${state_dir}, if an argument or a variable names it."""
    found = next((item for item in words if STATE_DIR_TOKEN in item.text), None)
    return () if found is None else (PathRequest(STATE_DIR_TOKEN, "write", where=found.keys),)


def check_env_name(faults: Faults, keys: KeyPath, name: str) -> None:
    if not is_variable_name(name):
        message = f"{quoted(name)} cannot be the name of an environment variable"
        faults.error(keys, "env_name", message, "letters, digits and _ only, not starting with a digit")
    elif len(name) > NAME_LIMIT:
        faults.error(
            keys, "env_name", f"the name of a variable has {len(name)} characters; the limit is {NAME_LIMIT}"
        )


def check_path(faults: Faults, item: Item, path: str, home: str, *, write: bool, hint: str = "") -> None:
    """Check a host path that a plugin asks for: absolute, without detours, and not on the hard denylist.

    `path` is the item's text with `~` expanded.
    """
    shown = quoted(item.text)
    below = path
    if STATE_DIR_TOKEN in path:
        if not write:
            message = f"{shown}: {STATE_DIR_TOKEN} can only be asked for as a writable path"
            faults.error(item.keys, "sandbox_state_dir", message, "move it to the writable paths")
            return
        if not _is_state_path(path):
            message = f"{shown}: {STATE_DIR_TOKEN} has to be the beginning of the path"
            faults.error(item.keys, "sandbox_state_dir", message)
            return
        below = "/state" + path[len(STATE_DIR_TOKEN) :]
    if not below.startswith("/"):
        if not hint and "$" in path:
            hint = f"only {STATE_DIR_TOKEN} is expanded, at the beginning of a writable path"
        faults.error(item.keys, "sandbox_relative_path", f"{shown} is not an absolute path", hint)
        return
    if len(os.fsencode(path)) > PATH_LIMIT or any(len(os.fsencode(p)) > NAME_LIMIT for p in path.split("/")):
        faults.error(item.keys, "sandbox_path_too_long", f"{shown} is longer than any path can be")
        return
    if below != "/" and any(part in ("", ".", "..") for part in below.split("/")[1:]):
        message = f"{shown} contains an empty, '.' or '..' segment"
        faults.error(
            item.keys, "sandbox_path_detour", message, "write the path without them and without a trailing /"
        )
        # Checked against the denylist as well: if it is denied too, that is the better reason.
        below = "/" + os.path.normpath(below).lstrip("/")
    if STATE_DIR_TOKEN not in path:
        hit = lexical_hit(below, (home,) if home.startswith("/") else ())
        if hit is not None:
            faults.error(item.keys, DENYLIST_RULE, f"{shown} {hit.clause()}", hit.hint())


def _is_state_path(path: str) -> bool:
    rest = path.removeprefix(STATE_DIR_TOKEN)
    return rest != path and (not rest or rest.startswith("/")) and STATE_DIR_TOKEN not in rest


# --- network ---------------------------------------------------------------------------------------


HTTPS_PORTS = (443,)  # of an entry that names none
FEWER_PORTS = "name fewer ports, or * for every port of a host"  # a hint, for ports_fault()


def hosts(faults: Faults, items: Sequence[Item], keys: KeyPath, none: str) -> tuple[str, ...]:
    """Check an allowlist: the rules of sandbox/network/rules.py, without ranges of addresses and without a
    rule for every name. An empty list means no network. `none`: how this contract spells that."""
    if not items:
        message = "the allowlist is empty, so there is no network"
        faults.warn(keys, "network_allowlist", message, f"to say so, write {none}")
    found: dict[str, None] = {}
    for item in items:
        try:
            found[_parse_entry(item.text)] = None
        except ValueError as error:
            message = f"{quoted(item.text)} {error}"
            hint = "entries look like example.com:443 or *.example.com:443"
            faults.error(item.keys, "network_allowlist", message, hint)
    if fault := ports_fault(map(parse_rule, found)):
        faults.error(keys, "network_allowlist", f"the list {fault}", FEWER_PORTS)
    return tuple(found)


def hidden(faults: Faults, items: Sequence[Item], network: Network | None) -> tuple[str, ...]:
    """Check entries of `hide`: NAME@HOST, or NAME for the hosts of its list."""
    found: dict[str, None] = {}
    listed = [parse_rule(host).without_requests() for host in (() if network is None else network.hosts)]
    for item in items:
        try:
            hiding = parse_hiding(item.text, default_ports=HTTPS_PORTS)
            if signs(hiding.name):
                raise ValueError("makes signatures and does not travel, so it cannot be hidden")
        except ValueError as error:
            faults.error(item.keys, "hide", f"{quoted(item.text)} {error}")
            continue
        found[str(hiding)] = None
        if hiding.host and not any(covers(rule, parse_rule(hiding.host)) for rule in listed):
            message = f"{quoted(item.text)}: its network does not have {hiding.host}, so no host can use it"
            faults.warn(item.keys, "hide", message, f'add "{hiding.host}" to network')
    return tuple(found)


def ssh(faults: Faults, keys: Sequence[Item], hosts: Sequence[Item]) -> tuple[str, ...]:
    """Check entries of `ssh-keys` and `ssh-hosts`."""
    found: dict[str, None] = {}
    for items, parse, name in (
        (keys, ssh_access.parse_key, "ssh-keys"),
        (hosts, ssh_access.parse_host, "ssh-hosts"),
    ):
        for item in items:
            try:
                found[parse(item.text)] = None
            except ValueError as error:
                faults.error(item.keys, name, f"{quoted(item.text)} {error}")
    return tuple(found)


def _parse_entry(text: str) -> str:
    rule = _parse_readable(text, HTTPS_PORTS)
    if rule.kind == "any":
        raise ValueError("stands for every name; list the names, or a wildcard such as *.example.com")
    return str(rule)


def parse_host(text: str) -> str:
    """`name:port` or `name:*` in lower case, for contracts that know no other entry; ValueError with the
    second half of a sentence otherwise."""
    host, _, port = text.rpartition(":")
    if "*" in host:
        raise ValueError("contains a wildcard; list each name")
    rule = _parse_readable(text, ())
    if "," in port or "-" in port:
        raise ValueError("has more than one port; list the name once for each")
    return str(rule)


def _parse_readable(text: str, default_ports: Sequence[int]) -> HostRule:
    """Parse a host whose name is spelled as it is looked up: people read a manifest before they trust it."""
    if not text.isascii():
        raise ValueError("has a name outside ASCII; write its xn-- form")
    if text.endswith(".") or text.rpartition(":")[0].endswith("."):
        raise ValueError("has a dot at the end of its name; leave it out")
    return parse_rule(text, default_ports=default_ports)


# --- system calls ----------------------------------------------------------------------------------


def seccomp(sandbox: Table, where: Where) -> tuple[SeccompProfile | None, Where]:
    """The profile a table asks for, and `where` with its keys. The model refuses any other word."""
    asked = sandbox.string("seccomp")
    profiles: tuple[SeccompProfile, ...] = ("strict", "default", "compat")
    profile = next((profile for profile in profiles if profile == asked), None)
    return profile, where if profile is None else (*where, ("seccomp", sandbox.at("seccomp")))


# --- limits ----------------------------------------------------------------------------------------

_SIZE = "Bytes, or text such as 256M."
_TIME = "Seconds, or text such as 30s, 2m."
# runner exec passes the plugin's streams on without reading them, so it cannot know when a plugin answers.
_UNREAD = "Not enforced by runner exec, which does not read the streams."
LIMITS: dict[str, str] = {
    "memory": f"Memory of all its processes, with what they keep in /tmp and /dev/shm. {_SIZE}",
    "pids": "Processes and threads.",
    "cpu": 'Processor, in cores: 0.5, 2 or "50%".',
    "cpu_time": f"Processor time of all its processes. {_TIME}",
    "io": "Bytes read, and bytes written, per second and disk; also as text such as 10M.",
    "open_files": "Open files of each process.",
    "file_size": f"Largest file. {_SIZE}",
    "locked_memory": f"Memory kept from being swapped out, of each process. {_SIZE}",
    "message_queues": f"POSIX message queues. {_SIZE}",
    "disk": f"What it may store in each folder it can write to. {_SIZE}",
    "tmp": f"Size of /tmp. {_SIZE}",
    "shm": f"Size of /dev/shm. {_SIZE}",
    "output": f"All output together. {_SIZE}",
    "output_lines": "Lines of all output together.",
    "launch": f"Time until its program has started. {_TIME}",
    "handshake": f"Time from its program's start to its first answer. {_TIME} {_UNREAD}",
    "call": f"Time for each answer. {_TIME} {_UNREAD}",
    "idle": f"Time without a call. {_TIME} {_UNREAD}",
    "teardown": f"Time to end after it was asked to. {_TIME}",
    "deadline": f"Time from start to end. {_TIME}",
}


class Word(NamedTuple):
    """A contract's own word for a limit: a plain number of some unit."""

    limit: str
    unit: str  # as written behind the number: "M", "ms", "%"
    about: str


Words = Mapping[str, Word]


def limits_schema(words: Words | None = None) -> dict[str, Any]:
    """JSON Schema of a table of limits."""
    properties: dict[str, Any] = {}
    for name, about in LIMITS.items():
        number = "number" if name in FRACTIONAL_LIMITS else "integer"
        properties[name] = {"description": about, "type": [number, "string"]}
    for name, word in (words or {}).items():
        properties[name] = {"description": word.about, "type": "number", "exclusiveMinimum": 0}
    return {
        "type": "object",
        "description": "Limits the plugin declares for itself. The operator's policy may set lower ones.",
        "properties": properties,
        "additionalProperties": False,
    }


def limits(faults: Faults, parent: Table, name: str, words: Words | None = None) -> tuple[Limits, Where]:
    """The limits of a table, and the keys that lead to each. `words` are the contract's own.

    An unknown limit is an error, even where the contract ignores unknown keys: its author would rely on a
    limit that is not enforced.
    """
    value = parent.data.get(name)
    if value is not None and not isinstance(value, dict):
        syntax = faults.document.format
        message = f"{name} has to be {model.type_name({}, syntax)}, not {model.type_name(value, syntax)}"
        faults.error(parent.at(name), "invalid_type", message)
    table = parent.table(name)
    own = words or {}
    known = (*LIMITS, *own)
    found: dict[str, Any] = {}
    said: dict[str, str] = {}
    for key in table.data:
        if key not in known:
            hint = did_you_mean(key, known) or f"known here: {', '.join(known)}"
            faults.error(table.at(key), "limit_unknown", f"the limit {quoted(key)} is unknown", hint)
            continue
        limit = own[key].limit if key in own else key
        if limit in said:
            message = f"{said[limit]} and {key} set the same limit"
            faults.error(table.at(key), "limit_twice", message, "keep one of them")
            continue
        said[limit] = key
        try:
            found[limit] = _limit(table.data[key], limit, own.get(key))
        except ValueError as error:
            faults.error(table.at(key), "limit_value", f"{key}: {error}")
    return Limits(**found), tuple((limit, table.at(said[limit])) for limit in found)


def _limit(value: object, limit: str, word: Word | None) -> int | float:
    if word is None:
        return parse_limit(limit, value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"it has to be a number, not {model.type_name(value)}")
    if not 0 < value < 1e12:  # also NaN
        raise ValueError("it has to be more than 0" if value <= 0 else "that is not a possible number")
    return parse_limit(limit, f"{value}{word.unit}")
