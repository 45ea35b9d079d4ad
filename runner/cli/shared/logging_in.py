"""--ssh-key and --ssh-host: a plugin logs in with keys of the person's ssh agent, and does not get them."""

from __future__ import annotations

from sandbox.spec import Network
from sandbox.speed.typed import TYPE_CHECKING, Any, Sequence

if TYPE_CHECKING:
    import argparse

_KEY_HELP = "let it log in with this key of your ssh agent, and"
_HOST_HELP = "at this host (HOST or HOST:PORT) only; known_hosts has it"


def add_ssh(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument("--ssh-key", metavar="SHA256:…", action="append", default=[], help=_KEY_HELP)
    parser.add_argument("--ssh-host", metavar="HOST", action="append", default=[], help=_HOST_HELP)


def ssh_of(args: Any) -> tuple[str, ...]:
    """The entries of both options. Raises ValueError if one is wrong."""
    if not args.ssh_key and not args.ssh_host:
        return ()
    from sandbox.network.ssh import parse_host, parse_key

    found: dict[str, None] = {}
    for option, words, parse in (("key", args.ssh_key, parse_key), ("host", args.ssh_host, parse_host)):
        if not words:
            raise ValueError(f"--ssh-{option}: it is missing; a key goes with a host, and a host with a key")
        for word in words:
            try:
                found[parse(word)] = None
            except ValueError as error:
                raise ValueError(f"--ssh-{option} {word}: it {error}") from None
    return tuple(found)


def with_ssh_hosts(asked: Network | None, ssh: Sequence[str]) -> Network | None:
    """To log in at a host is to reach it."""
    if not ssh or (asked is not None and asked.mode == "host"):
        return asked
    from sandbox.network.ssh import hosts_of

    known = () if asked is None else asked.hosts
    return Network("allowlist", tuple(dict.fromkeys((*known, *hosts_of(ssh)))))
