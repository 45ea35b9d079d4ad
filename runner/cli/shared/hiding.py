"""--hide: credentials that a plugin uses and does not get."""

from __future__ import annotations

from sandbox.spec import Network
from sandbox.speed.typed import Sequence

HIDE_HELP = "let it use a variable's value at this host, without having it"


def hide_of(words: Sequence[str]) -> tuple[str, ...]:
    """The entries of --hide. Raises ValueError if one is wrong."""
    if not words:
        return ()
    from sandbox.network.credentials import read_hidings

    return read_hidings(words, "--hide")


def with_hidden_hosts(asked: Network | None, hide: Sequence[str]) -> Network | None:
    """To hide a value for a host is to reach that host, unless a rule about requests says more."""
    if not hide:
        return asked
    from sandbox.network.credentials import parse_hiding
    from sandbox.network.rules import covers, parse_rule

    known = () if asked is None else asked.hosts
    rules = [parse_rule(host).without_requests() for host in known]
    more: list[str] = []
    for each in hide:
        host = parse_hiding(each).host
        if not host or any(covers(rule, parse_rule(host)) for rule in rules):
            continue
        if narrow := next((other for other in known if " " in other and _meets(host, other)), None):
            raise ValueError(
                f"--hide {each}: it would allow other requests than {narrow}; name the host of that"
            )
        more.append(host)
    if not more or (asked is not None and asked.mode == "host"):
        return asked
    return Network("allowlist", tuple(dict.fromkeys((*known, *more))))


def _meets(host: str, narrow: str) -> bool:
    """Whether some connections fit both."""
    from sandbox.network.rules import covers, parse_rule

    wide, rule = parse_rule(host), parse_rule(narrow).without_requests()
    ports = any(one <= last and first <= other for one, other in wide.ports for first, last in rule.ports)
    same = wide._replace(ports=rule.ports)
    return ports and (covers(same, rule) or covers(rule, same))
