"""Credentials that a plugin uses and never has: the values that the plan, the launch and the broker share.

A placeholder stands in the plugin's variable. The broker (sandbox/broker) ends the TLS of connections to some
hosts, and puts the value in the placeholder's place, in requests to the hosts that the value is for.
"""

from __future__ import annotations

from sandbox.speed.typed import Literal
from sandbox.speed.value import NamedTuple

Place = Literal["header", "query"]  # of a request


class Credential(NamedTuple):
    name: str  # of the variable in the cage
    # For whom its value is: rules as sandbox/network/rules.py writes them. Never every name.
    hosts: tuple[str, ...]
    where: tuple[Place, ...] = ("header",)  # where a placeholder is replaced


class BrokerPlan(NamedTuple):
    """What the broker of one plugin does. Plain data, part of the plan. It has no value and no
    placeholder."""

    credentials: tuple[Credential, ...] = ()
    # Rules about requests, as rules.py writes them: "GET,HEAD api.github.com:443/repos/acme/**". A host that
    # has some gets no other requests.
    requests: tuple[str, ...] = ()
    authorities: tuple[str, ...] = ()  # files of roots that servers may have beside the system's

    @property
    def hosts(self) -> tuple[str, ...]:
        """Rules of the connections that the broker reads. All others pass unread."""
        every = [host for credential in self.credentials for host in credential.hosts]
        return tuple(dict.fromkeys((*every, *self.requests)))


class HiddenValue(NamedTuple):
    """What a credential is in one launch."""

    name: str
    placeholder: bytes
    value: bytes

    def __repr__(self) -> str:
        return f"<hidden value of {self.name}>"


class SshHost(NamedTuple):
    """A host that the plugin may log in at."""

    name: str  # in lower case, without a port
    port: int
    keys: tuple[bytes, ...]  # those that known_hosts has for it: one of them has to prove each session


class SshPlan(NamedTuple):
    """What the ssh agent in a cage serves (sandbox/broker/agent). Plain data, part of the plan."""

    keys: tuple[str, ...]  # fingerprints, as `ssh-add -l` writes them: SHA256:…
    hosts: tuple[SshHost, ...]


# The socket in the cage is the only file of this folder.
SSH_FOLDER = "/.ssh-agent"
SSH_SOCKET = "socket"
