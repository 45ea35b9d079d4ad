"""Rules about hosts and ports that may be reached, and the function that judges all connections.

| written                       | allows                                                       |
|-------------------------------|--------------------------------------------------------------|
| example.com:443               | this name on this port                                       |
| example.com                   | this name on the caller's default ports                      |
| *.example.com:443             | every name below example.com, and not example.com            |
| *:443                         | every name, and no address                                   |
| example.com:*                 | this name on every port                                      |
| example.com:80,443,8000-8010  | this name on these ports, at most 64                         |
| 192.0.2.7:443, [2001:db8::7]  | this address                                                 |
| 10.0.0.0/8:5432, [fd00::]/8   | every address of a range; for operators only                 |
| localhost:6379                | this port of this machine, by no other name or address       |
| GET,HEAD example.com:443/a/** | these requests to this name; ** stands for any path below    |
| * example.com:443/a/*/b       | every method; * stands for anything within one segment       |

Who has only rules about requests for a host gets no other requests there (sandbox/broker). A rule decides
which names and addresses may be asked for. Whether the address of a name may be dialled is decided by
addresses.py, after the name was resolved.
"""

from __future__ import annotations

from sandbox.network.hosts import DIGITS, Host, parse_host, read_address
from sandbox.speed.typed import Iterable, Literal
from sandbox.speed.value import NamedTuple

MOST_PORTS = 64  # of one rule, and of all rules of a list together, without rules for every port
LAST_PORT = 65535
# The one word for the loopback of this machine. Addresses of it, and other names that lead there, are never
# dialled, so that nobody opens it without saying so.
LOCALHOST = "localhost"
LOCAL_ADDRESSES = ("127.0.0.1", "::1")

Ports = tuple[tuple[int, int], ...]  # first and last port of each range, sorted and merged
EVERY_PORT: Ports = ((1, LAST_PORT),)

# Of rules about requests: others are read without `re`, which each gate would import. A path is without an
# empty segment, and without one of dots: no two readers read it differently.
_METHOD = r"[A-Z][A-Z-]{0,31}\Z"
_PATH = r"(?:/(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._~!$&'()*+,;=:@-]+)*/?\Z"
_BLANKS = frozenset(" \t\n\r\f\v")
NEVER_ALLOWED = ("CONNECT", "TRACE")


class HostRule(NamedTuple):
    kind: Literal["any", "below", "name", "address", "range", "loopback"]
    host: str  # "" for "any"; the name, the address or the range; example.com for *.example.com
    ports: Ports
    methods: tuple[str, ...] | None = None  # of a rule about requests; (): every one. None: of another rule
    path: str = ""  # a pattern of paths; "": every one

    def __str__(self) -> str:
        """The rule as it is written. parse_rule() reads it back."""
        if self.methods is not None:
            return f"{','.join(self.methods) or '*'} {self.without_requests()}{self.path}"
        host = {"any": "*", "below": f"*.{self.host}"}.get(self.kind, self.host)
        if ":" in host:
            address, slash, bits = host.partition("/")
            host = f"[{address}]{slash}{bits}"
        return f"{host}:{_write_ports(self.ports)}"

    def without_requests(self) -> HostRule:
        """The connections on which the requests may be made."""
        return self._replace(methods=None, path="")


def parse_rule(text: str, *, default_ports: Iterable[int] = (), ranges: bool = False) -> HostRule:
    """The rule. Raises ValueError with the rest of a sentence that begins with the text.

    `default_ports`: for a rule without a port; if empty, every rule must have a port. `ranges`: whether a
    range of addresses is allowed.
    """
    if "://" in text:
        host = text.partition("://")[2].partition("/")[0].rpartition("@")[2]
        shown = host if host.isascii() and host.isprintable() and host else "example.com:443"
        raise ValueError(f"is a URL; write the host only, as in {shown}")
    words, blank, place = text.partition(" ")
    if blank and not set(words) & set(".:["):
        return _parse_requests(words, place, default_ports)
    host, ports = _split(text)
    if ports is None:
        usual = merge_ports((port, port) for port in default_ports)
        if not usual:
            raise ValueError("has no port")
    else:
        usual = parse_ports(ports)
    if host == "*":
        return HostRule("any", "", usual)
    if "/" in host:
        if not ranges:
            raise ValueError(
                "contains a slash: a rule with a path begins with the methods, as in "
                "'GET,HEAD example.com/a/**', and ranges of addresses are for operators"
            )
        return _parse_range(host, usual)
    below = host.startswith("*.")
    found = parse_host(host[2:] if below else host)
    if below and found.version:
        raise ValueError("has a wildcard in front of an address; a range is written as in 10.0.0.0/8")
    if found.text == LOCALHOST and not below:
        return HostRule("loopback", LOCALHOST, usual)
    return HostRule("below" if below else "address" if found.version else "name", found.text, usual)


def _parse_requests(words: str, place: str, default_ports: Iterable[int]) -> HostRule:
    """A rule about requests: methods, and behind a blank a host and perhaps a path."""
    import re

    methods = () if words == "*" else tuple(dict.fromkeys(words.split(",")))
    wrong = next((word for word in methods if not re.match(_METHOD, word, re.ASCII)), None)
    if wrong is not None:
        raise ValueError(f"has {wrong!a} where a method is expected, as in GET,HEAD or * for every one")
    if refused := next((word for word in methods if word in NEVER_ALLOWED), None):
        raise ValueError(f"allows {refused}, and such requests are never passed on")
    host, slash, path = place.partition("/")
    if re.match(r"\d{1,3}(?::|\Z)", path) and re.match(r"[\d.]+\Z|\[", host):
        raise ValueError("is about the requests to a range of addresses; name the address")
    path = slash + path
    if path and not re.match(_PATH, path, re.ASCII):
        raise ValueError(f"has {path!a}, which is no path: it may have no //, .., ?, % or blanks")
    if wrong := next((part for part in path.split("/") if "**" in part and part != "**"), None):
        raise ValueError(f"has {wrong!a} in its path; ** stands alone between slashes")
    rule = parse_rule(host, default_ports=default_ports)
    if rule.kind == "any":
        raise ValueError("is about the requests to every host; name the host")
    if rule.ports == EVERY_PORT:
        raise ValueError("is about the requests on every port; name the port")
    return rule._replace(methods=methods, path=path)


def parse_rules(
    texts: Iterable[str], *, default_ports: Iterable[int] = (), ranges: bool = False
) -> tuple[HostRule, ...]:
    """The rules of a list, without duplicates. A ValueError begins with the text of the wrong rule."""
    usual = tuple(default_ports)
    rules: dict[HostRule, None] = {}
    for text in texts:
        try:
            rules[parse_rule(text, default_ports=usual, ranges=ranges)] = None
        except ValueError as error:
            raise ValueError(f"{text[:60]!a} {error}") from None
    if fault := ports_fault(rules):
        raise ValueError(f"the list {fault}")
    return tuple(rules)


def parse_authority(text: str, default_port: int) -> tuple[Host, int]:
    """The host and the port of `example.com` or `example.com:8443`, as in URLs and in the header Host."""
    host, port = _split(text)
    return parse_host(host), default_port if port is None else _parse_port(port)


def judge(rules: Iterable[HostRule], host: Host, port: int) -> HostRule | None:
    """The rule that allows a connection to `host` on `port`, or None if it must not be made."""
    asked = HostRule("address" if host.version else "name", host.text, ((port, port),))
    return next((rule for rule in rules if covers(rule, asked)), None)


def judge_loopback(rules: Iterable[HostRule], port: int) -> HostRule | None:
    """The rule that opens this port of this machine to the plugin's own loopback, or None."""
    return next((rule for rule in rules if covers(rule, loopback_rule((port,)))), None)


def loopback_rule(ports: Iterable[int]) -> HostRule:
    return HostRule("loopback", LOCALHOST, merge_ports((port, port) for port in ports))


def covers(wide: HostRule, narrow: HostRule) -> bool:
    """Whether everything that `narrow` allows is allowed by `wide`."""
    return (
        _covers_ports(wide.ports, narrow.ports)
        and _covers_hosts(wide, narrow)
        and (wide.methods is None or _covers_requests(wide, narrow))
    )


def listed_ports(rules: Iterable[HostRule]) -> Ports:
    """The ports of all rules together, without those of rules for every port."""
    return merge_ports(pair for rule in rules if rule.ports != EVERY_PORT for pair in rule.ports)


def ports_fault(rules: Iterable[HostRule]) -> str:
    """What is wrong with the ports of all rules together, as the rest of a sentence that begins with the
    list; "" if nothing is. Each port needs its own listeners in the plugin's namespace."""
    number = count_ports(listed_ports(rules))
    return f"names {number} ports; {MOST_PORTS} are the most" if number > MOST_PORTS else ""


def _covers_hosts(wide: HostRule, narrow: HostRule) -> bool:
    match wide.kind:
        case "any":
            return narrow.kind in ("any", "below", "name")
        case "below":
            if narrow.kind == "below" and narrow.host == wide.host:
                return True
            return narrow.kind in ("below", "name") and narrow.host.endswith(f".{wide.host}")
        case "range":
            return narrow.kind in ("address", "range") and _lies_within(narrow.host, wide.host)
        case "name" | "address" | "loopback":
            return (narrow.kind, narrow.host) == (wide.kind, wide.host)


def _covers_requests(wide: HostRule, narrow: HostRule) -> bool:
    """`wide` is a rule about requests."""
    if narrow.methods is None or (wide.methods and not set(narrow.methods or "*") <= set(wide.methods)):
        return False
    below, star, rest = wide.path.partition("**")
    if star and not rest and "*" not in below:
        return narrow.path.startswith(below)
    return wide.path in ("", narrow.path)


def _lies_within(narrow: str, wide: str) -> bool:
    import ipaddress

    inner, outer = ipaddress.ip_network(narrow), ipaddress.ip_network(wide)
    if isinstance(inner, ipaddress.IPv4Network):
        return isinstance(outer, ipaddress.IPv4Network) and inner.subnet_of(outer)
    return isinstance(outer, ipaddress.IPv6Network) and inner.subnet_of(outer)


def _split(text: str) -> tuple[str, str | None]:
    """The host and the ports. A colon inside brackets is part of an address."""
    before, bracket, after = text.rpartition("]")
    name, colon, ports = after.partition(":")
    if ":" in ports:
        raise ValueError("has two colons; an IPv6 address is written in brackets, as in [2001:db8::1]:443")
    return before + bracket + name, ports if colon else None


def _parse_range(text: str, ports: Ports) -> HostRule:
    import ipaddress

    first, _, length = text.rpartition("/")
    if not first or not _BLANKS.isdisjoint(first) or not (length == "0" or _is_number(length, 3)):
        raise ValueError("is not a range of addresses, as in 10.0.0.0/8 or [fd00::]/8")
    bits = int(length)
    in_brackets = first.startswith("[") and first.endswith("]")
    address = read_address(first[1:-1] if in_brackets else first)
    if address is None or in_brackets != (address.version == 6):
        # Also ::ffff:10.0.0.0, which read_address() turns into an IPv4 address: its prefix length would mean
        # something else.
        raise ValueError("is not a range of addresses in its plain spelling, as in 10.0.0.0/8 or [fd00::]/8")
    if bits > address.max_prefixlen:
        raise ValueError(f"has a range of {bits} bits; such an address has {address.max_prefixlen}")
    if bits == address.max_prefixlen:
        return HostRule("address", parse_host(first).text, ports)
    try:
        return HostRule("range", str(ipaddress.ip_network((address, bits))), ports)
    except ValueError:
        whole = ipaddress.ip_network((address, bits), strict=False)
        raise ValueError(f"is an address inside a range; the range is {whole}") from None


# --- ports -----------------------------------------------------------------------------------------


def parse_ports(text: str) -> Ports:
    """Parse `443`, `80,443`, `8000-8010` or `*`. Raises ValueError with the rest of a sentence."""
    if text == "*":
        return EVERY_PORT
    if len(text) > 12 * MOST_PORTS:
        raise ValueError(f"names too many ports; {MOST_PORTS} are the most")
    pairs = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        pairs.append((_parse_port(first), _parse_port(last if dash else first)))
        if pairs[-1][0] > pairs[-1][1]:
            raise ValueError(f"has a range of ports that ends before it begins ({part})")
    ports = merge_ports(pairs)
    if count_ports(ports) > MOST_PORTS:
        raise ValueError(f"names {count_ports(ports)} ports; {MOST_PORTS} are the most, or * for every port")
    return ports


def merge_ports(pairs: Iterable[tuple[int, int]]) -> Ports:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(pairs):
        if not 0 < first <= last <= LAST_PORT:
            raise ValueError(f"has no port between 1 and {LAST_PORT}")
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def count_ports(ports: Ports) -> int:
    return sum(last - first + 1 for first, last in ports)


def _parse_port(text: str) -> int:
    if not _is_number(text, 5) or int(text) > LAST_PORT:
        raise ValueError(f"has no port between 1 and {LAST_PORT}")
    return int(text)


def _is_number(text: str, most_digits: int) -> bool:
    """Whether it is a positive number in its plain spelling."""
    return 0 < len(text) <= most_digits and not text.startswith("0") and not text.strip(DIGITS)


def _covers_ports(wide: Ports, narrow: Ports) -> bool:
    return all(any(low <= first and last <= high for low, high in wide) for first, last in narrow)


def _write_ports(ports: Ports) -> str:
    if ports == EVERY_PORT:
        return "*"
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ports)
