"""Reads known_hosts as OpenSSH does (sshd(8), SSH_KNOWN_HOSTS FILE FORMAT), with three differences.

A key that is revoked for any host is none. Authorities do not count. [HOST]:PORT does not fall back to HOST.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
from collections.abc import Iterable
from typing import NamedTuple

from sandbox.broker.agent.host_key import read_kind
from sandbox.broker.agent.messages import Malformed

MOST_BYTES = 4 << 20  # of one file. A part of one could miss the lines that revoke
MOST_KEYS = 64  # of one host: real ones have three
_DEFAULT_PORT = 22


class _Line(NamedTuple):
    hosts: str
    key: bytes


class KnownHosts:
    def __init__(self, texts: Iterable[bytes]) -> None:
        """`texts`: the content of each file. Raises ValueError if one is too large."""
        self._lines: list[_Line] = []
        self._authorities: list[_Line] = []
        self._revoked: set[bytes] = set()
        for text in texts:
            if len(text) > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
            for line in text.split(b"\n"):
                self._take(line.decode("utf-8", "replace").split())

    def _take(self, words: list[str]) -> None:
        if not words or words[0].startswith("#"):
            return
        marker = words.pop(0) if words[0].startswith("@") else ""
        if len(words) < 3:
            return
        try:
            key = base64.b64decode(words[2], validate=True)
        except (binascii.Error, ValueError):
            return
        if marker == "@revoked":
            self._revoked.add(key)
        elif marker == "@cert-authority":
            self._authorities.append(_Line(words[0], key))
        elif not marker:
            try:
                if read_kind(key).decode() == words[1]:
                    self._lines.append(_Line(words[0], key))
            except Malformed:
                return

    def keys(self, host: str, port: int) -> tuple[bytes, ...]:
        """The keys that a host may prove itself with. `host`: in lower case."""
        name = host_name(host, port)
        found = dict.fromkeys(line.key for line in self._lines if _matches(line.hosts, name))
        return tuple(key for key in found if key not in self._revoked)[:MOST_KEYS]

    def has_authority(self, host: str, port: int) -> bool:
        name = host_name(host, port)
        return any(_matches(line.hosts, name) for line in self._authorities)


def host_name(host: str, port: int) -> str:
    """A host as known_hosts writes it."""
    return host if port == _DEFAULT_PORT else f"[{host}]:{port}"


def _matches(patterns: str, name: str) -> bool:
    if patterns.startswith("|"):
        return _matches_hash(patterns, name)
    found = False
    for pattern in patterns.lower().split(","):
        negated = pattern.startswith("!")
        if _matches_pattern(pattern[negated:], name):
            if negated:
                return False
            found = True
    return found


def _matches_pattern(pattern: str, name: str) -> bool:
    if "*" not in pattern and "?" not in pattern:  # most are names, and making an expression takes 0.1 ms
        return pattern == name
    # Only * and ? are special. [ begins a host with a port.
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def _matches_hash(field: str, name: str) -> bool:
    """|1|SALT|HMAC-SHA1 of the name: one name, and no pattern."""
    parts = field.split("|")
    if len(parts) != 4 or parts[1] != "1":
        return False
    try:
        salt, digest = (base64.b64decode(part, validate=True) for part in parts[2:])
    except (binascii.Error, ValueError):
        return False
    return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)
