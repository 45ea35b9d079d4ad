"""Make new inputs from examples: changes of bytes, of words, and of whole parts.

`random.Random` decides, or one whose choices are hypothesis's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random

MOST_BYTES = 64 << 10  # of an input

# Words, numbers, texts in quotes, blanks; everything else is a token of one byte.
_TOKEN = re.compile(rb'"(?:[^"\\\n]|\\.){0,200}"|[A-Za-z_][\w.-]*|[0-9]+|[ \t]+|\r?\n|.', re.DOTALL)

# What parsers are often wrong about.
ODD = (
    *(b"", b"\0", b"\n", b"\r\n", b"\r", b"\t", b" ", b"\xff", b"\xef\xbb\xbf", b"\xc3", b"\xe2\x80\xa8"),
    *("é".encode(), "ß".encode(), "\u202e".encode(), "\U0001f600".encode(), b"\xed\xa0\x80", b"\\ud800"),
    *(b"0", b"-1", b"-0", b"1e999", b"1e400", b"NaN", b"Infinity", b"1_000", b"0x10", b"0o7", b"1.5", b"007"),
    *(b"9223372036854775808", b"18446744073709551616", b"9" * 400, b"0" * 5000, b"2147483648", b"65536"),
    *(b"null", b"true", b"false", b"~", b"no", b"{}", b"[]", b'""', b"''", b'{"a":1}', b"[1]", b'"x"', b"x"),
    *(b"../..", b"/", b"//", b"/proc/self/root", b"~", b"${HOME}", b"${A:-", b"$(x)", b"%s", b"{0}", b"*"),
    *(b'"""', b"'''", b"#", b"//", b"/*", b"*/", b"---", b"...", b"&a", b"*a", b"<<: *a", b"!!x", b"|", b">"),
    *(b"[", b"]", b"{", b"}", b":", b",", b"=", b".", b"-", b"- ", b": ", b"? ", b'"', b"'", b"\\", b"\\x"),
    *(b"[a]\n", b"[[a]]\n", b"a.b.c = 1\n", b"a: &x [*x]\n", b"1979-05-27T07:32:00Z", b"12:30:00", b"inf"),
)

Change = Callable[[Random, bytes, Sequence[bytes]], bytes]


def mutate(random: Random, examples: Sequence[bytes]) -> bytes:
    """A new input: one of the examples with one to five changes."""
    data = random.choice(examples)
    for _ in range(random.choice((1, 1, 1, 2, 3, 5))):
        data = random.choice(_CHANGES)(random, data, examples)[:MOST_BYTES]
    return data


def _place(random: Random, data: Sequence[object]) -> int:
    return random.randint(0, len(data))


def _part(random: Random, data: Sequence[object]) -> tuple[int, int]:
    start = _place(random, data)
    return start, min(len(data), start + random.choice((1, 1, 2, 4, 16, 100, 1000)))


def _change_byte(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = _place(random, data)
    new = random.choice((0, 1, 9, 10, 13, 32, 34, 127, 128, 192, 255, random.randint(0, 255)))
    return data[:at] + bytes([new]) + data[at + 1 :]


def _change_bit(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    if not data:
        return data
    at = random.randint(0, len(data) - 1)
    return data[:at] + bytes([data[at] ^ 1 << random.randint(0, 7)]) + data[at + 1 :]


def _insert_odd(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = _place(random, data)
    return data[:at] + random.choice(ODD) + data[at:]


def _remove(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    start, end = _part(random, data)
    return data[:start] + data[end:]


def _move(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    start, end = _part(random, data)
    at = _place(random, data)
    return data[:at] + data[start:end] + data[at:]


def _cut(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    return data[: _place(random, data)]


def _repeat(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Long inputs: what takes the square of their length is slow."""
    start, end = _part(random, data)
    times = random.choice((2, 3, 10, 130, 1000, 20_000))
    return data[:end] + data[start:end] * min(times, MOST_BYTES // max(1, end - start)) + data[end:]


def _repeat_odd(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = _place(random, data)
    odd = random.choice(ODD) + random.choice((b"", random.choice(ODD)))
    return (
        data[:at]
        + odd * min(random.choice((3, 100, 1000, 20_000)), MOST_BYTES // max(1, len(odd)))
        + data[at:]
    )


def _join(random: Random, data: bytes, examples: Sequence[bytes]) -> bytes:
    other = random.choice(examples)
    return data[: _place(random, data)] + other[_place(random, other) :]


def _change_token(random: Random, data: bytes, examples: Sequence[bytes]) -> bytes:
    tokens = _TOKEN.findall(data[:MOST_BYTES])
    if not tokens:
        return random.choice(ODD)
    at = random.randint(0, len(tokens) - 1)
    other = _TOKEN.findall(random.choice(examples)[:4096]) or [b""]
    kept = tokens[at]
    new = random.choice((random.choice(ODD), random.choice(ODD), random.choice(other), random.choice(tokens)))
    if kept[:1] == b'"' == kept[-1:] and new[:1] != b'"' and random.randint(0, 1):
        new = b'"' + new + b'"'
    tokens[at] = new
    return b"".join(tokens)


def _move_line(random: Random, data: bytes, examples: Sequence[bytes]) -> bytes:
    lines = data.splitlines(keepends=True) or [b""]
    others = random.choice((data, random.choice(examples))).splitlines(keepends=True) or [b""]
    at = random.randint(0, len(lines) - 1)
    lines[at : at + random.randint(0, 1)] = [random.choice(others)]
    return b"".join(lines)


_CHANGES: Sequence[Change] = (
    *(_change_byte, _change_bit, _insert_odd, _remove, _move, _cut, _repeat, _repeat_odd, _join),
    *(_change_token, _change_token, _change_token, _change_token, _move_line, _move_line),
)
