"""Parses a host into its one normal spelling: a name in A-labels, or an address.

A text that programs read in different ways is refused. So the host that is compared with a rule is the host
that is resolved, and no other program reads another host from the same text.
"""

from __future__ import annotations

from sandbox.speed.typed import TYPE_CHECKING
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

MOST_NAME_CHARACTERS = 253  # of a name without its last dot: 255 bytes on the wire (RFC 1035)
MOST_LABEL_CHARACTERS = 63

# Without regular expressions: each gate would import `re`, which takes 8 ms of processor time.
DIGITS = "0123456789"
_LABEL_CHARACTERS = f"{DIGITS}abcdefghijklmnopqrstuvwxyz-"
_LOWER = {ord(upper): upper.lower() for upper in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}
# IDNA 2008 keeps these characters, IDNA 2003 replaces or removes them: two programs would look up two names.
_READ_TWO_WAYS = frozenset("ßς\u200c\u200d")


class Host(NamedTuple):
    text: str  # lower case, A-labels, without a last dot and without brackets
    version: int = 0  # 4 or 6 for an address, 0 for a name

    def __str__(self) -> str:
        return f"[{self.text}]" if self.version == 6 else self.text


def parse_host(text: str) -> Host:
    """The host; an IPv6 address has brackets. Raises ValueError with the rest of a sentence that begins with
    the text."""
    if text.startswith("[") or text.endswith("]"):
        if not (text.startswith("[") and text.endswith("]")):
            raise ValueError("has a bracket without its partner")
        address = parse_address(text[1:-1])
        if ":" not in text:
            raise ValueError("has brackets around something that is no IPv6 address")
        return address
    if ":" in text:
        raise ValueError("has a colon; an IPv6 address is written in brackets, as in [2001:db8::1]")
    return _parse_name(text)


def parse_address(text: str) -> Host:
    """An address in its plain spelling, without brackets. An IPv4-mapped address such as ::ffff:1.2.3.4
    becomes the IPv4 address, as the kernel reads it."""
    if "%" in text:
        raise ValueError("has a zone; the zone of an address means something on one machine only")
    address = read_address(text)
    if address is None:
        raise ValueError("is neither a host name nor an address in its plain spelling")
    if address.is_unspecified or address.is_multicast or str(address) == "255.255.255.255":
        raise ValueError("is not the address of one host")
    return Host(str(address), address.version)


def read_address(text: str) -> IPv4Address | IPv6Address | None:
    """The address, with ::ffff:1.2.3.4 read as 1.2.3.4; None if `text` is no address."""
    import ipaddress

    if not text.isascii() or "%" in text:
        return None
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address


def _parse_name(text: str) -> Host:
    if len(text) > MOST_NAME_CHARACTERS + 1:
        raise ValueError(f"has {len(text)} characters; a name has at most {MOST_NAME_CHARACTERS}")
    _check_characters(text)
    name = text.removesuffix(".")
    if not name:
        raise ValueError("has no name of a host")
    # Only A to Z: other upper-case letters are refused below. Lower case of some would be another letter.
    name = name.translate(_LOWER)
    labels = [_parse_label(label) for label in name.split(".")]
    name = ".".join(labels)
    if _looks_numeric(labels[-1]):
        if text.endswith("."):
            raise ValueError("is an address with a dot at its end")
        return parse_address(name)
    if len(name) > MOST_NAME_CHARACTERS:
        raise ValueError(f"has {len(name)} characters as it is looked up; at most {MOST_NAME_CHARACTERS} are")
    return Host(name)


def _check_characters(text: str) -> None:
    for character in text:
        if character == "\0":
            raise ValueError("contains NUL")
        if character.isspace():
            raise ValueError("contains white space")
        if character < " " or "\x7f" <= character <= "\x9f":
            raise ValueError("contains a control character")
        if character == "*":
            raise ValueError("contains a wildcard where one name is meant")
        if character == "%":
            raise ValueError("contains a percent sign; a name is written without escapes")
        if character == "_":
            raise ValueError("contains an underscore, which no host name has")


def _parse_label(label: str) -> str:
    if not label:
        raise ValueError("has an empty label: two dots in a row, or a dot at its beginning")
    if not label.isascii():
        label = _encode_label(label)
    if len(label) > MOST_LABEL_CHARACTERS:
        raise ValueError(
            f"has a label of {len(label)} characters; a label has at most {MOST_LABEL_CHARACTERS}"
        )
    if label.strip(_LABEL_CHARACTERS) or label.startswith("-") or label.endswith("-"):
        raise ValueError("is not a host name: its labels are letters, digits and, between these, hyphens")
    return label


def _looks_numeric(label: str) -> bool:
    """Resolvers read 127.1, 0x7f000001, 0177.0.0.1 and 2130706433 as addresses. So a name whose last label
    looks like a number has to be an address in its plain spelling; else it is refused."""
    if label.startswith("0x"):
        return not label[2:].strip(f"{DIGITS}abcdef")
    return bool(label) and not label.strip(DIGITS)


def _encode_label(label: str) -> str:
    """The A-label by IDNA 2008, without the mapping that some programs apply first. A label that only a
    mapping makes valid (upper case, wide letters, other full stops) is refused."""
    import idna

    if not _READ_TWO_WAYS.isdisjoint(label):
        raise ValueError("contains a letter that programs look up in two ways; write its xn-- form")
    try:
        return idna.alabel(label).decode("ascii")
    except UnicodeError as error:
        raise ValueError(f"is not an international name in its plain spelling ({error})") from None
