"""The operator's name servers and hosts file. They are read once, before the gate gives up the file
system."""

from __future__ import annotations

import _socket as socket
import os

from sandbox.network.hosts import parse_host, read_address
from sandbox.speed.typed import Callable
from sandbox.speed.value import NamedTuple

RESOLV_CONF = "/etc/resolv.conf"
HOSTS = "/etc/hosts"

MOST_SERVERS = 3  # as libc (MAXNS)
_MOST_CONFIGURATION_BYTES = 64 * 1024
_MOST_HOSTS_BYTES = 256 * 1024
_MOST_HOSTS = 1024
_MOST_ADDRESSES = 16  # of one name
_MOST_SECONDS = 5  # of the option timeout
_DNS_PORT = 53
_DEFAULT_SERVER = "127.0.0.1"  # if resolv.conf names none; the same as in libc


class NameServer(NamedTuple):
    family: int
    address: tuple[str, int] | tuple[str, int, int, int]


class Upstream(NamedTuple):
    servers: tuple[NameServer, ...]
    attempts: int = 2  # for each server
    seconds: float = 2.0  # until the next server is asked; earlier ones may still reply
    last_seconds: float = 5.0  # until the last query fails; the same as in libc
    hosts: tuple[tuple[str, tuple[str, ...]], ...] = ()  # names with their addresses


def read_upstream(
    wanted: Callable[[str], bool], resolv_conf: str = RESOLV_CONF, hosts: str = HOSTS
) -> Upstream:
    """Read both files; a missing one counts as empty. `wanted`: whether a name may be asked for; other names
    of the hosts file are left out. Search domains are ignored: a name is looked up as the plugin wrote it."""
    upstream = parse_resolv_conf(_read(resolv_conf, _MOST_CONFIGURATION_BYTES))
    return upstream._replace(hosts=parse_hosts(_read(hosts, _MOST_HOSTS_BYTES), wanted))


def _read(path: str, most: int) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        with open(fd, "rb", buffering=0) as file:
            return (file.read(most) or b"").decode("utf-8", "replace")
    except OSError:
        return ""


def parse_resolv_conf(text: str) -> Upstream:
    servers: list[NameServer] = []
    upstream = Upstream(())
    for line in text.splitlines():
        key, *words = line.split() or ("",)
        if key == "nameserver" and words and len(servers) < MOST_SERVERS:
            server = _parse_server(words[0])
            servers += [server] if server is not None else []
        elif key == "options":
            for option in words:
                name, _, value = option.partition(":")
                if name == "timeout" and value.isdecimal():
                    seconds = float(max(1, min(int(value[:4]), _MOST_SECONDS)))
                    upstream = upstream._replace(seconds=seconds, last_seconds=seconds)
                elif name == "attempts" and value.isdecimal():
                    upstream = upstream._replace(attempts=max(1, min(int(value[:4]), 5)))
    if not servers:
        servers.append(NameServer(socket.AF_INET, (_DEFAULT_SERVER, _DNS_PORT)))
    return upstream._replace(servers=tuple(servers))


def _parse_server(text: str) -> NameServer | None:
    address, _, zone = text.partition("%")
    found = read_address(address)
    if found is None:
        return None
    if found.version == 4:
        return NameServer(socket.AF_INET, (str(found), _DNS_PORT))
    try:
        scope = int(zone) if zone.isdecimal() else socket.if_nametoindex(zone) if zone else 0
    except OSError:
        return None
    return NameServer(socket.AF_INET6, (str(found), _DNS_PORT, 0, scope))


def parse_hosts(text: str, wanted: Callable[[str], bool]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    found: dict[str, dict[str, None]] = {}
    for line in text.splitlines():
        address, *names = line.partition("#")[0].split() or ("",)
        if not names or (parsed := read_address(address)) is None:
            continue
        for name in names:
            try:
                host = parse_host(name) if name.isascii() else None
            except ValueError:
                continue
            if host is None or host.version or not wanted(host.text):
                continue
            if host.text in found or len(found) < _MOST_HOSTS:
                found.setdefault(host.text, {})[str(parsed)] = None
    return tuple((name, tuple(addresses)[:_MOST_ADDRESSES]) for name, addresses in found.items())
