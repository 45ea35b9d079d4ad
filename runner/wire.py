"""JSON as it comes from strangers: every sequence of bytes is a value or a WireFault, and nothing else.

On the standard json module: it is the one fast parser with hooks, and the rules here are not those of any
parser (faster ones refuse lone surrogates, which rune's host accepts, or take numbers beyond 64 bit for floats
without a word), and it is no dependency. Hooks are slow, though, so a scan at the speed of bytes methods finds
out first whether a frame can need them; nearly none does.

What is refused does not depend on the machine or the stack: depth is counted before anything is parsed.
"""

from __future__ import annotations

import json
import math
import re
from itertools import accumulate
from typing import Any, Literal, NoReturn

Cause = Literal["bad_json", "bom", "bad_number", "too_deep", "duplicate_key"]

MOST_DEPTH = 128
LEAST_INTEGER, MOST_INTEGER = -(2**63), 2**64 - 1


class WireFault(ValueError):
    """`detail` is a sentence for people."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(cause, detail)
        self.cause: Cause = cause
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.cause}: {self.detail}"


def decode(raw: bytes, *, identity: frozenset[str] = frozenset()) -> Any:
    """The value of `raw`. Raises WireFault.

    Bytes that are no UTF-8 and halves of surrogate pairs become U+FFFD. Of two equal keys the last one counts,
    except for keys of `identity` in the outermost object: those say what a message is, and may be there once.
    """
    if raw.startswith(b"\xef\xbb\xbf"):
        raise WireFault("bom", "it begins with a byte order mark; JSON on a stream has none")
    _check_depth(raw)
    text = _without_lone_surrogates(raw).decode("utf-8", "replace")
    decoder = _CAREFUL if _may_have_bad_numbers(raw) else _QUICK
    try:
        if _may_repeat(raw, identity):
            return _object(text, decoder, identity)
        return decoder.decode(text)
    except json.JSONDecodeError as error:
        raise WireFault("bad_json", f"{error.msg} at character {error.pos}") from None
    except RecursionError:  # of the caller's stack, then: ours is 128 deep
        raise WireFault("too_deep", "nested too deeply for the stack") from None


def message(raw: bytes, *, identity: frozenset[str] = frozenset()) -> tuple[Any, Cause | None, str]:
    """The value, and None; or None, the cause, and its sentence."""
    try:
        return decode(raw, identity=identity), None, ""
    except WireFault as fault:
        return None, fault.cause, fault.detail


def encode(value: Any) -> bytes:
    """Compact, in UTF-8, without a newline. Raises ValueError for what is no JSON."""
    try:
        return _ENCODER.encode(value).encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None


# --- numbers ---------------------------------------------------------------------------------------------


def _refuse_constant(name: str) -> NoReturn:
    raise WireFault("bad_number", f"{name} is no number in JSON")


def _integer(digits: str) -> int:
    # Never converted if it is long: that takes a time quadratic in its length, and CPython refuses it.
    if len(digits) <= 20 and LEAST_INTEGER <= (number := int(digits)) <= MOST_INTEGER:
        return number
    raise WireFault("bad_number", f"an integer beyond 64 bit: {_shortened(digits)}")


def _float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise WireFault("bad_number", f"a number too large for a double: {_shortened(digits)}")
    return number


def _shortened(digits: str) -> str:
    return digits if len(digits) <= 40 else f"{digits[:40]}… ({len(digits)} characters)"


_QUICK = json.JSONDecoder(parse_constant=_refuse_constant)
_CAREFUL = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_integer, parse_float=_float)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

_DIGITS = bytes.maketrans(b"123456789E", b"000000000e")


def _may_have_bad_numbers(raw: bytes) -> bool:
    """Only what has 19 digits in a row, or an exponent of three, can be too large."""
    plain = raw.translate(_DIGITS, b"+")
    return b"0" * 19 in plain or b"e000" in plain


# --- depth -----------------------------------------------------------------------------------------------

_STRUCTURE = b'"[]{}'
_NOT_STRUCTURE = bytes(set(range(256)) - set(_STRUCTURE))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # +1 and -1 as signed bytes


def _check_depth(raw: bytes) -> None:
    """Exact for JSON, and for as much of anything else as a parser reads before it gives up."""
    if raw.count(b"[") + raw.count(b"{") <= MOST_DEPTH:
        return
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Every other piece between two quotes is outside of a string.
    brackets = b"".join(raw.translate(None, _NOT_STRUCTURE).split(b'"')[::2])
    steps = memoryview(brackets.translate(_STEPS)).cast("b")
    if max(accumulate(steps), default=0) > MOST_DEPTH:
        raise WireFault("too_deep", f"nested more than {MOST_DEPTH} deep")


# --- surrogates ------------------------------------------------------------------------------------------

_PAIR = rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_LONE = rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
_PAIRS = re.compile(_PAIR)
_HALVES = re.compile(_LONE)
_ESCAPES = re.compile(rb"(\\[^u]|" + _PAIR + rb")|" + _LONE, re.DOTALL)


def _without_lone_surrogates(raw: bytes) -> bytes:
    if b"\\ud" not in raw and b"\\uD" not in raw:
        return raw
    if not _HALVES.search(_PAIRS.sub(b"_", raw.replace(b"\\\\", b"_"))):
        return raw
    return _ESCAPES.sub(lambda match: match[1] or rb"\ufffd", raw)


# --- keys ------------------------------------------------------------------------------------------------

_BLANKS = re.compile(r"[ \t\n\r]*")


def _may_repeat(raw: bytes, identity: frozenset[str]) -> bool:
    if b"\\u00" in raw:  # a key may be written in escapes
        return bool(identity)
    return any(raw.count(b'"%b"' % key.encode()) > 1 for key in identity)


def _object(text: str, decoder: json.JSONDecoder, identity: frozenset[str]) -> Any:
    """The outermost object, read key by key. A hook would be called for every object inside it, too."""
    found: dict[str, Any] = {}
    at = _after(text, 0, "{")
    while at and text.startswith('"', at):
        key, end = decoder.raw_decode(text, at)
        at = _after(text, end, ":")
        if not at:
            break
        if key in identity and key in found:
            raise WireFault("duplicate_key", f"it has {json.dumps(key)} twice")
        found[key], end = decoder.raw_decode(text, at)
        at = _after(text, end, ",")
        if not at:
            at = _after(text, end, "}")
            if at == len(text) and at:
                return found
            break
    return decoder.decode(text)  # another value, an empty object or no JSON: the parser knows what to say


def _after(text: str, at: int, mark: str) -> int:
    """Where it goes on after `mark`, blanks around it left out; 0 if it is not there."""
    at = _skip(text, at)
    return _skip(text, at + 1) if text.startswith(mark, at) else 0


def _skip(text: str, at: int) -> int:
    match = _BLANKS.match(text, at)
    assert match is not None  # no blanks are blanks
    return match.end()
