"""With which keys of the person's ssh agent a plugin logs in, and where: who asked, and who allowed it.

A person or an approval gives keys and hosts. A manifest alone gives nothing.
"""

from __future__ import annotations

from sandbox.network.rules import covers, parse_rule
from sandbox.network.ssh import MOST_KEYS, hosts_of, keys_of, parse_access
from sandbox.policy.policy import Policy
from sandbox.spec import Denial, Network
from sandbox.speed.typed import Iterator, Sequence


def find_ssh(
    said: Sequence[str],
    asked: Sequence[str],
    policy: Policy,
    network: Network,
    denials: list[Denial],
    *,
    caged: bool,
) -> tuple[str, ...]:
    """Keys and hosts; empty if anything about them is refused. `said`: by a person, on the command line or in
    an approval. `asked`: by the manifest."""
    found = tuple(dict.fromkeys((*said, *asked)))
    refused = [
        *(_unapproved(each, policy) for each in asked if each not in said),
        *_faults(found, network, caged),
    ]
    denials += refused
    return () if refused else found


def _unapproved(text: str, policy: Policy) -> Denial:
    reason = f"policy {policy.name} lets a plugin log in with your keys only if you allow it"
    return Denial("ssh_ceiling", f"ssh {text}", reason, "give the key and the host yourself, or allow them")


def _faults(found: Sequence[str], network: Network, caged: bool) -> Iterator[Denial]:
    keys, hosts = keys_of(found), hosts_of(found)
    for text in found:
        try:
            parse_access(text)
        except ValueError as error:
            yield Denial("ssh", f"ssh {text}", f"it {error}", "see `ssh-add -l`")
            return
    if not keys or not hosts:
        lacking = ("no host is named", "--ssh-host") if keys else ("no key is named", "--ssh-key")
        yield Denial("ssh", f"ssh {found[0]}", f"{lacking[0]} for it", f"name one with {lacking[1]}")
    if len(keys) > MOST_KEYS:
        yield Denial("ssh", f"{len(keys)} ssh keys", f"they are more than {MOST_KEYS}", "name fewer")
    if not caged:
        yield Denial("ssh", "ssh", "it would run without a cage", "let the manifest ask for one")
    elif network.mode == "host":
        reason = "with the whole network of this machine it is not known where it logs in"
        yield Denial("ssh_network", "ssh", reason, "name the hosts in place of network host")
    elif network.mode != "open":
        granted = [parse_rule(host, ranges=True).without_requests() for host in network.hosts]
        for host in hosts:
            if not any(covers(one, parse_rule(host)) for one in granted):
                reason = f"the plugin may not reach {host}"
                yield Denial("ssh_network", f"ssh {host}", reason, f"allow the host as well: --net {host}")
