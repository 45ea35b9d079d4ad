"""What stands for a value in the cage: it has the value's length, alphabet and known prefix, because clients
look at these before they send anything."""

from __future__ import annotations

import os

# What says whose token it is, and of which kind. Longer ones come first.
PREFIXES = (
    *(
        b"github_pat_",
        b"sk-proj-",
        b"sk-ant-",
        b"sk_live_",
        b"sk_test_",
        b"pk_live_",
        b"pk_test_",
        b"rk_live_",
    ),
    *(
        b"rk_test_",
        b"dop_v1_",
        b"secret_",
        b"glpat-",
        b"xoxb-",
        b"xoxp-",
        b"xapp-",
        b"pypi-",
        b"ghp_",
        b"gho_",
    ),
    *(b"ghu_", b"ghs_", b"ghr_", b"ntn_", b"npm_", b"AIza", b"ya29.", b"SG.", b"sk-", b"hf_"),
)
FEWEST_RANDOM_BITS = 64  # outside of the prefix: nobody guesses it, and nothing else is taken for it

_JWT_START = b"eyJ"  # of its first two parts: `{"` in base64
_UUID_SIZES, _UUID_KEPT = [8, 4, 4, 4, 12], (14, 19)  # the digits of its version and its variant are kept
_DIGITS, _LOWER, _UPPER = b"0123456789", b"abcdefghijklmnopqrstuvwxyz", b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CLASSES = (_DIGITS, _LOWER, _UPPER)
_HEX = (_DIGITS + b"abcdef", _DIGITS + b"ABCDEF")
_URL_SAFE = frozenset(b"".join(_CLASSES) + b"-_")


def make_placeholder(value: bytes) -> bytes:
    """Raises ValueError, with the rest of a sentence that begins with the value, if too little of it could be
    another."""
    alphabets = _alphabets(value)
    possible = 1
    for alphabet in alphabets:
        possible *= len(alphabet) or 1
    if (bits := possible.bit_length() - 1) < FEWEST_RANDOM_BITS:
        raise ValueError(
            f"is too short to hide: {bits} bits of it can be made up, {FEWEST_RANDOM_BITS} are the fewest"
        )
    while (made := _make(value, alphabets)) == value:
        pass
    return made


def same_shape(value: bytes, placeholder: bytes) -> bool:
    """Whether each encoding of both has one length, and both have the same characters beside letters and
    digits."""
    return len(value) == len(placeholder) and all(
        one == other or (_is_plain(one) and _is_plain(other))
        for one, other in zip(value, placeholder, strict=True)
    )


def cover(data: bytes, pairs: list[tuple[bytes, bytes]]) -> bytes:
    """The data with each value overwritten by its placeholder. `pairs`: values and placeholders, each of one
    length.

    Every value is looked for in the data as it was. If one were replaced after the other, a value that ends
    as another one begins would keep that from being found.
    """
    covered = bytearray(data)
    for value, placeholder in sorted(pairs, key=lambda pair: len(pair[0])):  # the longest has the last word
        overwrite(covered, data, value, placeholder)
    return bytes(covered)


def overwrite(covered: bytearray, data: bytes, value: bytes, placeholder: bytes, start: int = 0) -> None:
    """Write the placeholder into `covered`, wherever `data` has the value, from `start` on."""
    if len(value) != len(placeholder):
        raise ValueError("a placeholder has another length than its value")
    end = 0
    for place in find_all(data, value, start):
        begin, end = max(place, end), place + len(value)
        covered[begin:end] = placeholder[begin - place :]


def find_all(data: bytes, text: bytes, start: int = 0) -> list[int]:
    """Every place of a text, also where it overlaps itself. The time does not grow with the overlaps: the
    data may be of somebody who wants it to."""
    found: list[int] = []
    place = data.find(text, start) if text else -1
    if place < 0:
        return found
    # The least distance of two places that overlap.
    period = next(shift for shift in range(1, len(text) + 1) if text.startswith(text[shift:]))
    last = text[-period:]
    while place >= 0:
        found.append(place)
        end = place + len(text)
        place = place + period if data.startswith(last, end) else data.find(text, place + period + 1)
    return found


def _is_plain(byte: int) -> bool:
    return any(byte in each for each in _CLASSES)


def _is_uuid(value: bytes) -> bool:
    parts = value.split(b"-")
    return list(map(len, parts)) == _UUID_SIZES and not set(b"".join(parts).lower()) - set(_HEX[0])


def _make(value: bytes, alphabets: list[bytes]) -> bytes:
    return bytes(
        _choose(alphabet) if alphabet else byte for byte, alphabet in zip(value, alphabets, strict=True)
    )


def _choose(alphabet: bytes) -> int:
    most = 256 - 256 % len(alphabet)  # above it, some would be more likely than others
    while (byte := os.urandom(1)[0]) >= most:
        pass
    return alphabet[byte % len(alphabet)]


def _alphabets(value: bytes) -> list[bytes]:
    """For each byte those that may stand there; none if the byte is kept."""
    start = len(_prefix(value))
    rest = bytes(byte for byte in value[start:] if byte != ord("-"))
    whole = next((each for each in _HEX if rest and not set(rest) - set(each)), b"")
    if not set(rest) - set(_CLASSES[0]):
        whole = b""  # digits alone stay digits
    kept = {*range(start), *(_UUID_KEPT if _is_uuid(value) else ())}
    found = []
    for place, byte in enumerate(value):
        alphabet = next((each for each in _CLASSES if byte in each), b"")
        found.append(b"" if place in kept or not alphabet else whole or alphabet)
    return found


def _prefix(value: bytes) -> bytes:
    parts = value.split(b".")
    is_jwt = len(parts) == 3 and all(part.startswith(_JWT_START) for part in parts[:2])
    if is_jwt and _URL_SAFE.issuperset(b"".join(parts)):
        return parts[0] + b"." + _JWT_START  # the first part names an algorithm
    return next((prefix for prefix in PREFIXES if value.startswith(prefix)), b"")
