"""The capability strings of a manifest: what each asks of the cage.

read:fs:PATH, write:fs:PATH       a path of the host, absolute
exec:BINARY:PATH                  a program: its file is shown, read-only. It is no permission to start
                                  programs: a plugin may start every program that its cage shows
net:HOST:PORT, net:HOST:*         a host, by name
net:*                             every host, by name ("open"); only a policy can allow it
net:[]                            no network, said explicitly
kaged:storage:read, …:write       the storage broker (services.py); the cage gives it no meaning
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.contracts.kaged.declared import STORAGE_READ, STORAGE_WRITE
from runner.manifest import sandbox_request
from runner.manifest.table import Item
from sandbox.document.diagnostic import did_you_mean, quoted
from sandbox.document.faults import Faults
from sandbox.network.rules import parse_rule, ports_fault
from sandbox.spec import Access, KeyPath, Network, NetworkMode, PathRequest
from sandbox.speed.value import NamedTuple

_RULE = "capability_invalid"
_MOST_CAPABILITIES = 256
_FORMS = (
    "read:fs:PATH, write:fs:PATH, exec:BINARY:PATH, net:HOST:PORT, net:HOST:*, net:*, net:[], "
    f"{STORAGE_READ}, {STORAGE_WRITE}"
)
_PREFIXES = ("read:fs:", "write:fs:", "exec:", "net:", STORAGE_READ, STORAGE_WRITE)


class Capabilities(NamedTuple):
    strings: tuple[str, ...] = ()  # as the manifest has them, each once
    paths: tuple[PathRequest, ...] = ()
    network: Network = Network("none")


def read_capabilities(faults: Faults, items: Sequence[Item], keys: KeyPath, home: str) -> Capabilities:
    paths: dict[PathRequest, None] = {}
    network = _Network(faults, keys)
    if len(items) > _MOST_CAPABILITIES:
        message = f"there are {len(items)} capabilities; at most {_MOST_CAPABILITIES} are possible"
        faults.error(keys, "capabilities_too_many", message, "ask for the folders around the paths")
        return Capabilities()
    for item in items:
        kind, _, rest = item.text.partition(":")
        if item.text in (STORAGE_READ, STORAGE_WRITE):
            continue
        if kind in ("read", "write") and rest.startswith("fs:"):
            access: Access = "read" if kind == "read" else "write"
            path = rest.removeprefix("fs:")
            if _is_absolute(faults, item, path):
                sandbox_request.check_path(
                    faults, item._replace(text=path), path, home, write=kind == "write"
                )
                paths[PathRequest(path, access, where=item.keys)] = None
        elif kind == "exec":
            binary, _, path = rest.partition(":")
            if not binary:
                _refuse(faults, item, "names no binary", "it looks like exec:git:/usr/bin/git")
            elif _is_absolute(faults, item, path):
                sandbox_request.check_path(faults, item._replace(text=path), path, home, write=False)
                paths[PathRequest(path, "read", where=item.keys, file=True)] = None
        elif kind == "net" and rest:
            network.add(item, rest)
        else:
            near = did_you_mean(item.text, [each for each in _PREFIXES if each != item.text])
            hint = near or f"there are {_FORMS}"
            _refuse(faults, item, "is not a capability", hint)
    strings = tuple(dict.fromkeys(item.text for item in items))
    return Capabilities(strings, tuple(paths), network.asked())


def _is_absolute(faults: Faults, item: Item, path: str) -> bool:
    if path.startswith("/"):
        return True
    _refuse(faults, item, "has no absolute path", "write the path from the root on: /srv/data")
    return False


def _refuse(faults: Faults, item: Item, why: str, hint: str) -> None:
    faults.error(item.keys, _RULE, f"{quoted(item.text)} {why}", hint)


class _Network:
    """The net: capabilities of one manifest, taken together."""

    def __init__(self, faults: Faults, keys: KeyPath) -> None:
        self._faults = faults
        self._keys = keys
        self._hosts: dict[str, None] = {}
        self._all: Item | None = None
        self._none: Item | None = None

    def add(self, item: Item, rest: str) -> None:
        if rest == "*":
            self._all = item
        elif rest == "[]":
            self._none = item
        else:
            try:
                self._hosts[sandbox_request.parse_host(rest)] = None
            except ValueError as error:
                _refuse(self._faults, item, str(error), "it looks like net:example.com:443")

    def asked(self) -> Network:
        """A manifest without such a capability asks for no network, whatever the policy's default is."""
        if self._none is not None:
            if self._hosts or self._all is not None:
                message = f"{quoted(self._none.text)} says no network, and another capability asks for some"
                self._faults.error(self._none.keys, _RULE, message, "keep one of the two")
            return Network("none", where=self._none.keys)
        if self._all is not None:
            return Network("open", where=self._all.keys)
        if fault := ports_fault(map(parse_rule, self._hosts)):
            message = f"the net: capabilities together have a list that {fault}"
            self._faults.error(self._keys, _RULE, message, sandbox_request.FEWER_PORTS)
        mode: NetworkMode = "allowlist" if self._hosts else "none"
        return Network(mode, tuple(self._hosts), self._keys)
