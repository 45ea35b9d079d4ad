"""Whether a plugin can be given a list of hosts here: its network namespace is made, as a launch makes it."""

from __future__ import annotations

from sandbox.doctor.finding import Finding
from sandbox.network.egress import EgressPlan
from sandbox.network.recipe import find_recipe
from sandbox.network.trial import RecipeRefusal, try_recipe

_SOME_HOSTS = EgressPlan(("example.com:443",))
_EVERY_PORT = EgressPlan(("*:*",), every_port=True)


def named_hosts() -> list[Finding]:
    try:
        try_recipe(find_recipe(_SOME_HOSTS))
    except RecipeRefusal as refused:
        return [
            Finding(
                "named_hosts",
                "missing",
                f"no plugin can be given a list of hosts: {refused}",
                remedy="follow the remedies for user namespaces and network; in a container, its seccomp "
                "filter has to allow unshare and netlink sockets (docs/containers.md)",
                cause="network_namespace",
            )
        ]
    works = Finding("named_hosts", "ok", "a network namespace for a list of hosts was made and set up")
    try:
        try_recipe(find_recipe(_EVERY_PORT))
    except RecipeRefusal as refused:
        return [
            works,
            Finding(
                "every_port",
                "info",
                f'rules for every port (example.com:*) and network = "open" are refused: {refused}',
                remedy="use a kernel built with CONFIG_NF_TABLES, CONFIG_NFT_NAT and CONFIG_NFT_REDIR, "
                "or list the ports",
                cause="nftables",
            ),
        ]
    return [works, Finding("every_port", "ok", "nftables redirected every port in that namespace")]
