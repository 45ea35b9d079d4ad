"""Logging in with a person's keys: how keys and hosts are written, and what the agent in a cage serves.

What is asked for is one list: fingerprints, as `ssh-add -l` writes them, and hosts, as rules about hosts.
"""

from __future__ import annotations

from sandbox.speed.typed import Sequence
from sandbox.speed.value import NamedTuple

# The socket in the cage is the only file of this folder.
FOLDER = "/.ssh-agent"
SOCKET = "socket"
MOST_KEYS = 32
SSH_PORTS = (22,)  # of a host without one

_BEGINNING, _CHARACTERS = "SHA256:", 43


class SshHost(NamedTuple):
    """A host that the plugin may log in at."""

    name: str  # without its port
    port: int
    keys: tuple[bytes, ...] = ()  # those that known_hosts has for it: one of them has to prove each session


class SshPlan(NamedTuple):
    """What the ssh agent in a cage serves (sandbox/broker/agent). Plain data, part of the plan."""

    keys: tuple[str, ...]
    hosts: tuple[SshHost, ...]


def is_key(text: str) -> bool:
    return text.startswith(_BEGINNING)


def parse_key(text: str) -> str:
    """Raises ValueError with the rest of a sentence that begins with the text."""
    rest = text.removeprefix(_BEGINNING)
    plain = rest.isascii() and all(each.isalnum() or each in "+/" for each in rest)
    if not is_key(text) or len(rest) != _CHARACTERS or not plain:
        raise ValueError("is no fingerprint of a key; `ssh-add -l` shows them, as in SHA256:47DEQpj8…")
    return text


def parse_host(text: str) -> str:
    """The host as a rule. Raises ValueError with the rest of a sentence that begins with the text."""
    from sandbox.network.rules import parse_rule

    if "@" in text:
        raise ValueError("has an account in front; write the host only, as in git.example.com")
    rule = parse_rule(text, default_ports=SSH_PORTS)
    if rule.kind not in ("name", "address", "loopback") or rule.methods is not None:
        raise ValueError("stands for several hosts; name the one whose key known_hosts has")
    [(first, last), *more] = rule.ports
    if first != last or more:
        raise ValueError("has several ports; write one, as in git.example.com:22")
    return str(rule)


def parse_access(text: str) -> str:
    """A key or a host, in its normal form. Raises ValueError."""
    return parse_key(text) if is_key(text) else parse_host(text)


def read_access(words: Sequence[str], option: str) -> tuple[str, ...]:
    """Keys and hosts as an operator writes them, in their normal form. `option`: begins the message of the
    ValueError about a wrong one."""
    found: dict[str, None] = {}
    for word in words:
        try:
            found[parse_access(word)] = None
        except ValueError as error:
            raise ValueError(f"{option} {word}: it {error}") from None
    return tuple(found)


def split_host(text: str) -> SshHost:
    """A host without its keys, from what parse_host() has returned."""
    name, _, port = text.rpartition(":")
    return SshHost(name.strip("[]"), int(port))


def keys_of(access: Sequence[str]) -> tuple[str, ...]:
    return tuple(each for each in access if is_key(each))


def hosts_of(access: Sequence[str]) -> tuple[str, ...]:
    return tuple(each for each in access if not is_key(each))
