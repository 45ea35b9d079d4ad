"""JSON from plugins: every sequence of bytes gives a value or a WireFault, and nothing else.

The parser is the standard json module, the only fast one with hooks. Faster parsers refuse lone surrogates,
which one contract's host accepts, or silently turn an integer beyond 64 bits into a float. Hooks are slow,
so a scan with methods of `bytes` finds out first whether a frame can need them. Almost no frame does.

Refusals do not depend on the machine or the stack: the depth is counted before parsing. A line
that is not JSON is bad_json even if it begins like a bad number ("Infinity loop started"): for some
contracts that is a stray print and not a fault.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from itertools import accumulate
from typing import Any, Literal

from sandbox.speed.value import NamedTuple

# ambiguous: it is JSON, and hosts could read it differently. Those who read messages find that.
Cause = Literal["bad_json", "bom", "bad_number", "too_deep", "too_many_values", "duplicate_key", "ambiguous"]

MOST_DEPTH = 128
# Values of one message, roughly. A value of two bytes on the wire becomes an object of some fifty bytes, and
# parsing holds the interpreter's lock, even in a thread: this many values take about 0.4 s.
MOST_VALUES = 2_000_000
# Bytes of the values of one message, plus the parser's own, as estimated below. A line of 16
# MiB with one long string takes 36 MiB, or 144 MiB if it has a character beyond 16 bits.
MOST_MEMORY = 160 << 20
LEAST_INTEGER, MOST_INTEGER = -(2**63), 2**64 - 1


class WireFault(ValueError):
    """Why a frame is refused. `detail` is a sentence for messages."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(cause, detail)
        self.cause: Cause = cause
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.cause}: {self.detail}"


class Reading(NamedTuple):
    """A value; or the cause of its refusal, with a sentence in `detail`."""

    value: Any
    cause: Cause | None = None
    detail: str = ""
    weight: int = 0  # upper bound of the bytes the value takes in memory


def decode(raw: bytes, *, identity: frozenset[str] = frozenset(), unique: bool = False) -> Any:
    """The value of `raw`. Raises WireFault.

    Bytes that are not UTF-8 and halves of surrogate pairs become U+FFFD. Of two equal keys the last one
    counts. Keys of `identity` decide the kind of a message and may be in the outermost object only once.
    `unique`: no object at any depth may have a key twice.
    """
    return _decode(raw, identity, unique).value


def _decode(raw: bytes, identity: frozenset[str], unique: bool) -> Reading:
    if raw.startswith(b"\xef\xbb\xbf"):
        raise WireFault("bom", "it begins with a byte order mark; JSON on a stream has none")
    outline = _outline(raw)
    if len(outline.rest) > MOST_VALUES and sum(map(outline.rest.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise WireFault("too_many_values", f"more than {MOST_VALUES} values in one message")
    keys = unique or _may_repeat(raw, outline, identity)
    if len(raw) <= _SHORT_BYTES:
        weight, meanwhile = len(raw) * _MOST_MEMORY_PER_BYTE, 0
    else:
        weight, meanwhile = _weigh(raw, outline, keys)
    if weight + meanwhile > MOST_MEMORY:
        raise WireFault("too_many_values", f"its values take more than {MOST_MEMORY >> 20} MiB of memory")
    if _too_deep(outline.rest):
        raise WireFault("too_deep", f"nested more than {MOST_DEPTH} deep")
    hooks = _Hooks()
    numbers, escapes = _may_have_bad_numbers(outline.rest), outline.escapes
    del outline  # it is as long as the message
    decoder = hooks.decoder(numbers=numbers, keys=keys)
    try:
        value = decoder.decode(_text_of(raw, escapes))  # nothing else may hold the text: it is long
    except json.JSONDecodeError as error:
        raise WireFault("bad_json", f"{error.msg} at character {error.pos}") from None
    except RecursionError:  # the caller's stack is nearly full: ours needs 128 levels
        raise WireFault("too_deep", "nested too deeply for the stack") from None
    if hooks.bad_number:
        raise WireFault("bad_number", hooks.bad_number)
    repeated = hooks.repeated(identity) if isinstance(value, dict) else None
    if unique and repeated is None:
        repeated = hooks.doubled
    if repeated is not None:
        raise WireFault("duplicate_key", f"it has the key {json.dumps(repeated)} twice")
    return Reading(value, None, "", weight)


def message(raw: bytes, *, identity: frozenset[str] = frozenset(), unique: bool = False) -> Reading:
    """Like `decode`, but returns the fault instead of raising it."""
    if len(raw) <= _SHORT_BYTES and not unique and _is_plain(raw):
        try:
            value, end = _scan_short(text := raw.decode("utf-8", "replace"), 0)
            if end == len(text) and not (type(value) is dict and _may_have_twice(raw, value, identity)):
                return Reading._make((value, None, "", len(raw) * _MOST_MEMORY_PER_BYTE))
        except (ValueError, StopIteration, RecursionError):
            pass  # `decode` below finds the fault
    try:
        return _decode(raw, identity, unique)
    except WireFault as fault:
        return Reading(None, fault.cause, fault.detail)


def encode(value: Any) -> bytes:
    """Compact, in UTF-8, without a newline. Raises ValueError if `value` is not JSON."""
    if _chunks is not None:
        try:
            return "".join(_chunks(value, 0)).encode()
        # KeyError: another thread, which met a circle, has cleared what is shared.
        except (TypeError, ValueError, RecursionError, KeyError):
            _open.clear()  # the slow path below says what is wrong
    try:
        return _ENCODER.encode(value).encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None


_QUICK = json.JSONDecoder()
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


# The lists and mappings that are being written, by which the encoder notices a circle. Without them it would
# write a circle's content a thousand times, until the recursion ends.
_open: dict[int, Any] = {}


def _chunk_maker() -> Callable[[Any, int], tuple[str, ...]] | None:
    """The C encoder that JSONEncoder makes again for each value. Making it once saves a third of the time for
    a short value."""
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return None
    text = json.encoder.encode_basestring
    maker: Callable[[Any, int], tuple[str, ...]] = make(
        _open, _ENCODER.default, text, None, ":", ",", False, False, False
    )
    return maker


_chunks = _chunk_maker()


class _Hooks:
    """Collects faults while the parser goes on: bad_json takes precedence and is known only at the end."""

    def __init__(self) -> None:
        self.bad_number = ""  # the first one
        self.doubled: str | None = None  # the first key found twice in one object
        self._outermost: list[tuple[str, Any]] = []

    def decoder(self, *, numbers: bool, keys: bool) -> json.JSONDecoder:
        if not numbers and not keys:
            return _QUICK
        return json.JSONDecoder(
            parse_constant=self._constant if numbers else None,
            parse_int=self._integer if numbers else None,
            parse_float=self._float if numbers else None,
            object_pairs_hook=self._object if keys else None,
        )

    def repeated(self, identity: frozenset[str]) -> str | None:
        seen: set[str] = set()
        for key, _ in self._outermost:
            if key in seen:
                return key
            if key in identity:
                seen.add(key)
        return None

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._outermost = pairs  # the outermost object is finished last
        table = dict(pairs)
        if len(table) != len(pairs) and self.doubled is None:
            last = {key: place for place, (key, _) in enumerate(pairs)}
            self.doubled = next(key for place, (key, _) in enumerate(pairs) if last[key] != place)
        return table

    def _constant(self, name: str) -> None:
        self._refuse(f"{name} is not a number in JSON")

    def _integer(self, digits: str) -> int:
        # A long one is not converted: that takes time quadratic in its length, and CPython refuses it.
        number = int(digits) if len(digits) <= 20 else MOST_INTEGER + 1
        if not LEAST_INTEGER <= number <= MOST_INTEGER:
            self._refuse(f"an integer beyond 64 bit: {_shorten(digits)}")
        return number

    def _float(self, digits: str) -> float:
        number = float(digits)
        if math.isinf(number):
            self._refuse(f"a number too large for a double: {_shorten(digits)}")
        return number

    def _refuse(self, why: str) -> None:
        self.bad_number = self.bad_number or why


def _shorten(digits: str) -> str:
    return digits if len(digits) <= 40 else f"{digits[:40]}… ({len(digits)} characters)"


# --- short frames ------------------------------------------------------------------------------------------

_BACKSLASH = ord("\\")  # as a number it is found in a sixth of the time
_NINETEEN_DIGITS = b"0" * 19


def _is_plain(raw: bytes) -> bool:
    """Whether a short frame has no escape, no integer beyond 64 bit, and is not deep. These scans see the
    text of strings as well, so they may say no without need. They never say yes wrongly."""
    if _BACKSLASH in raw or raw.translate(_DIGITS).find(_NINETEEN_DIGITS) >= 0:
        return False
    # Each level has two brackets.
    return len(raw) <= 2 * MOST_DEPTH or raw.count(b"[") + raw.count(b"{") <= MOST_DEPTH


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(digits)
    return number


# Its hooks are called for what few frames have. That costs less than looking for it in each frame.
_scan_short: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder(
    parse_constant=_refuse_constant, parse_float=_finite
).scan_once  # type: ignore[attr-defined]

_quoted: dict[frozenset[str], tuple[tuple[str, bytes], ...]] = {}  # the keys of each `identity` there is


def _may_have_twice(raw: bytes, value: dict[str, Any], identity: frozenset[str]) -> bool:
    """Whether `value`, the outermost object, may have a key of `identity` twice. No key of it is escaped."""
    keys = _quoted.get(identity)
    if keys is None:
        keys = _quoted[identity] = tuple((key, b'"%b"' % key.encode()) for key in identity)
    for key, quoted in keys:  # noqa: SIM110 -- `any` with a generator takes three times as long
        if key in value and raw.count(quoted) > 1:
            return True
    return False


# --- before parsing: which hooks does the frame need? -----------------------------------------------------
# The scans are exact for JSON. For any other text they are exact up to the parser's first error. No scan may
# make an object for each quote or escape of a whole frame: an object takes at least 40 bytes, and a frame can
# have millions of them. So text is split in chunks.

_CHUNK_BYTES = 64 << 10

# Most long frames are a few long strings. Skipping the strings pays off only if they are few.
_FEW_STRINGS = 64
_LONG_STRING = 256


class _Outline(NamedTuple):
    rest: bytes  # the text outside strings, or all of it if there are many. No quote in it is escaped
    strings: list[bytes] | None  # if they are few; without escaped quotes and backslashes
    escapes: bool  # whether there is a backslash


def _outline(raw: bytes) -> _Outline:
    escapes = b"\\" in raw
    if escapes:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if len(raw) > _CHUNK_BYTES:
        return _long_outline(raw, escapes)
    pieces = raw.split(b'"', 2 * _FEW_STRINGS)
    if len(pieces) > 2 * _FEW_STRINGS:
        return _Outline(raw, None, escapes)
    return _Outline(b'""'.join(pieces[::2]), pieces[1::2], escapes)


def _long_outline(raw: bytes, escapes: bool) -> _Outline:
    """`_outline` without a copy of long strings. They cannot be keys of `identity`, which are short."""
    outside: list[bytes] = []
    strings: list[bytes] = []
    end = -1
    for _ in range(_FEW_STRINGS):
        begin = raw.find(b'"', end + 1)
        outside.append(raw[end + 1 :] if begin < 0 else raw[end + 1 : begin])
        if begin < 0:
            return _Outline(b'""'.join(outside), strings, escapes)
        end = raw.find(b'"', begin + 1)
        after = len(raw) if end < 0 else end
        strings.append(raw[begin + 1 : after] if after - begin <= _LONG_STRING else b"")
        if end < 0:
            return _Outline(b'""'.join(outside), strings, escapes)
    return _Outline(raw, None, escapes)


_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}'))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # +1 and -1 as signed bytes
_USUAL_DEPTH = 8


def _too_deep(rest: bytes) -> bool:
    # Two adjacent quotes can be removed: the rest stays inside or outside of a string as before.
    structure = rest.translate(_STEPS, _NOT_STRUCTURE).replace(b'""', b"")
    if b'"' in structure:
        structure = _outside_of_strings(structure)
    leafless = structure
    for levels in range(_USUAL_DEPTH):
        if len(leafless) + levels <= MOST_DEPTH:
            return False
        leafless = leafless.replace(b"\x01\xff", b"")
    return max(accumulate(memoryview(structure).cast("b"))) > MOST_DEPTH


def _outside_of_strings(text: bytes) -> bytes:
    kept = []
    inside = 0  # whether the chunk begins inside a string
    for start in range(0, len(text), _CHUNK_BYTES):
        pieces = text[start : start + _CHUNK_BYTES].split(b'"')
        kept.append(b"".join(pieces[inside::2]))
        inside ^= (len(pieces) - 1) & 1
    return b"".join(kept)


# Bytes in CPython on 64 bit, with the garbage collector's header, rounded up as the allocator does. A list is
# 80, with 32 for its first four elements; a dict is 80, with 128 for its first five keys. A further key takes
# at most 38 (just after the table has grown), a further element 9. A number is 32; the first one in a list or
# dict has no comma, so it is counted with the bracket. A string is 64, or 96 if not all of it is ASCII; its
# characters are counted by the length of the frame.
_LIST, _DICT, _KEY, _NEXT = 80 + 32 + 32, 80 + 128 + 32, 38, 9 + 32
_QUOTE, _WIDE_QUOTE = 32, 48
# While parsing: the parser remembers each key. To find repeated keys, there is also a list of pairs and a
# table of places.
_REMEMBERED, _PAIR = 38, 89 + 70

# Most frames are short and are estimated by their length. Nested arrays take 56 bytes of memory per byte.
_SHORT_BYTES, _MOST_MEMORY_PER_BYTE = 1024, 64

_BEYOND_16_BIT = tuple(bytes((lead,)) for lead in range(0xF0, 0xF5))


def _weigh(raw: bytes, outline: _Outline, pairs: bool) -> tuple[int, int]:
    """Bytes of the values, and bytes needed only while they are parsed."""
    rest = outline.rest
    width = _width(raw, outline.escapes)
    text = width * len(raw)
    quote = _QUOTE if width == 1 else _WIDE_QUOTE
    keys = rest.count(b":")
    weight = (
        text
        + _LIST * rest.count(b"[")
        + _DICT * rest.count(b"{")
        + _KEY * keys
        + _NEXT * rest.count(b",")
        + quote * rest.count(b'"')
    )
    meanwhile = text + text // 4 + (_REMEMBERED + _PAIR if pairs else _REMEMBERED) * keys
    return weight, meanwhile


def _width(raw: bytes, escapes: bool) -> int:
    """Bytes for each character. One wide character makes its whole string wide."""
    escapes = escapes and b"\\u" in raw
    if escapes and (b"\\ud" in raw or b"\\uD" in raw):
        return 4
    if raw.isascii():
        return 2 if escapes else 1
    return 4 if any(lead in raw for lead in _BEYOND_16_BIT) else 2


_DIGITS = bytes.maketrans(b"123456789E", b"000000000e")


def _may_have_bad_numbers(rest: bytes) -> bool:
    """Only 19 digits in a row, or an exponent of three digits, can be too large."""
    if b"NaN" in rest or b"Infinity" in rest:
        return True
    plain = rest.translate(_DIGITS)
    return b"0" * 19 in plain or b"e000" in plain or b"e+000" in plain


def _may_repeat(raw: bytes, outline: _Outline, identity: frozenset[str]) -> bool:
    if outline.escapes and b"\\u00" in raw:  # a key may be escaped
        return bool(identity)
    strings = outline.strings
    keys = (key.encode() for key in identity)
    if strings is None:
        return any(raw.count(b'"%b"' % key) > 1 for key in keys)
    return any(strings.count(key) > 1 for key in keys)


# --- surrogates ------------------------------------------------------------------------------------------

_LONE = re.compile(
    rb"\\u[dD](?:"
    rb"[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)
_MENDED = rb"\\ufffd"  # a template; the result has the same length as the match
# An escape has six bytes. Whether it is lone depends on the six bytes before and after it.
_AROUND_BYTES = 12


def _text_of(raw: bytes, escapes: bool) -> str:
    return (_without_lone_surrogates(raw) if escapes else raw).decode("utf-8", "replace")


def _without_lone_surrogates(raw: bytes) -> bytes:
    if b"\\ud" not in raw and b"\\uD" not in raw:
        return raw
    if b"\x01" in raw:
        return raw  # not JSON, which never contains this byte. Otherwise the byte can serve as a mark
    marked = raw.replace(b"\\\\", b"\x01")  # an escaped backslash, which escapes nothing after it
    return _mend_surrogates(marked).replace(b"\x01", b"\\\\")


def _mend_surrogates(text: bytes) -> bytes:
    """Like _LONE.sub(_MENDED, text), which would make two objects for each match at once."""
    if len(text) <= _CHUNK_BYTES:
        return _LONE.sub(_MENDED, text)
    chunks = []
    for start in range(0, len(text), _CHUNK_BYTES):
        before = min(start, _AROUND_BYTES)
        part = _LONE.sub(_MENDED, text[start - before : start + _CHUNK_BYTES + _AROUND_BYTES])
        chunks.append(part[before : before + _CHUNK_BYTES])  # all lengths are unchanged
    return b"".join(chunks)
