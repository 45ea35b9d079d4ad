"""The authority of one launch, and the certificate that the broker shows to the plugin.

Both are made before the plugin runs, in a process of its own that then ends: `cryptography` takes memory, and
the key of the authority is needed for a moment only. Nobody can sign anything else with it afterwards. One
certificate is for all hosts, because a confined process can load no other: OpenSSL's context takes it from a
file. So a name that is more than one label below a rule such as *.example.com has no certificate.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from sandbox.broker.certificate import Hosts, make_certificates
from sandbox.gate.confine import follow_parent
from sandbox.network.rules import LOCALHOST, HostRule

LOCAL_ADDRESSES = ("127.0.0.1", "::1")


def hosts_of(rules: Sequence[HostRule]) -> Hosts:
    names = {rule.host: None for rule in rules if rule.kind in ("name", "loopback")}
    names |= {f"*.{rule.host}": None for rule in rules if rule.kind == "below"}
    addresses = {rule.host: None for rule in rules if rule.kind == "address"}
    if LOCALHOST in names:
        addresses |= dict.fromkeys(LOCAL_ADDRESSES)
    return Hosts(tuple(names), tuple(addresses))


def fork_authority(hosts: Hosts, told: int, also_close: Sequence[int]) -> tuple[int, int]:
    """Make the certificates in a process of its own. The authority's goes to the pipe `told`; the key and the
    certificate for the plugin come from the second result, a pipe. The first result is the pid."""
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(ours)
            for fd in also_close:
                os.close(fd)
            follow_parent(lambda: os.getppid() == parent)
            authority, chain = make_certificates(hosts)
            _write(theirs, chain)
            _write(told, authority)
            code = 0
        finally:
            os._exit(code)
    os.close(theirs)
    return pid, ours


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
    os.close(fd)
