"""Decide what the ssh agent in a cage serves: which keys, and which hosts with which keys of theirs."""

from __future__ import annotations

from sandbox import look
from sandbox.network.ssh import SshHost, SshPlan, hosts_of, keys_of, split_host
from sandbox.plan.plan import PlanRefused
from sandbox.spec import Denial, Grant
from sandbox.speed.typed import TYPE_CHECKING, Iterator, Mapping

if TYPE_CHECKING:
    from sandbox.broker.agent.known_hosts import KnownHosts

_SYSTEM_FILES = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")


def plan_ssh(grant: Grant, environ: Mapping[str, str]) -> SshPlan | None:
    """None if no key was granted. Raises PlanRefused if known_hosts does not know one of the hosts: nobody
    could tell that host from another."""
    if not grant.ssh:
        return None
    from sandbox.broker.agent.known_hosts import KnownHosts, host_name

    home = environ.get("HOME", "")
    own = (f"{home}/.ssh/known_hosts", f"{home}/.ssh/known_hosts2") if home.startswith("/") else ()
    try:
        known = KnownHosts(_texts((*own, *_SYSTEM_FILES)))
    except ValueError as error:
        reason = f"known_hosts cannot be read: {error}"
        raise PlanRefused([Denial("ssh_host", "ssh", reason, "see what is in ~/.ssh/known_hosts")]) from None
    hosts, refusals = [], []
    for text in hosts_of(grant.ssh):
        host = split_host(text)
        keys = known.keys(host.name, host.port)
        if keys:
            hosts.append(host._replace(keys=keys))
        else:
            refusals.append(_unknown(text, host_name(host.name, host.port), known, host))
    if refusals:
        raise PlanRefused(refusals)
    return SshPlan(keys_of(grant.ssh), tuple(hosts))


def known_hosts_text(plan: SshPlan) -> bytes:
    """The file in the cage by which ssh there knows these hosts."""
    from base64 import b64encode

    from sandbox.broker.agent.host_key import read_kind
    from sandbox.broker.agent.known_hosts import host_name

    lines = [
        b"%s %s %s\n" % (host_name(host.name, host.port).encode(), read_kind(key), b64encode(key))
        for host in plan.hosts
        for key in host.keys
    ]
    return b"".join(lines)


def _texts(paths: tuple[str, ...]) -> Iterator[bytes]:
    from sandbox.broker.agent.known_hosts import MOST_BYTES

    for path in paths:
        look.note_content(path)
        try:
            with open(path, "rb") as file:
                yield file.read(MOST_BYTES + 1)
        except OSError:
            continue


def _unknown(text: str, name: str, known: KnownHosts, host: SshHost) -> Denial:
    why = f"known_hosts has no key of {name} that can be used"
    hint = f"log in once with `ssh` outside, and compare the fingerprint it shows; then {name} is known"
    if known.has_authority(host.name, host.port):
        why = f"known_hosts has only an authority for {name}, and certificates of hosts do not count"
        hint = "write the host's own key into ~/.ssh/known_hosts as well"
    return Denial("ssh_host", text, why, hint)
