"""The command line of an entry that `runner wrap` has wrapped: `runner run --wrapped JSON … -- OLD ARGV`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from sandbox.cache import fingerprint
from sandbox.value import NamedTuple

_PROGRAM = "runner"
_VERB = "run"
_MARK = "--wrapped"
_END = "--"
_LONGEST_NAME = 128  # that --name takes
_LOOKS_ESCAPED = re.compile(r"%(?=[0-9A-Fa-f]{2})")


class Unwrapped(NamedTuple):
    program: str  # the path of the runner, as written
    options: tuple[str, ...]  # of `runner run`, as written
    argv: tuple[str, ...]  # what stood there before: the command, then its arguments


def unwrapped(argv: Sequence[str]) -> Unwrapped | None:
    """The parts of a wrapped command line. None: it is none, or nothing stands behind its `--`."""
    words = tuple(argv)
    if words[1:2] != (_VERB,) or os.path.basename(words[0]) != _PROGRAM or _END not in words:
        return None
    end = words.index(_END)
    options, old = words[2:end], words[end + 1 :]
    marked = any(word == _MARK or word.startswith(_MARK + "=") for word in options)
    return Unwrapped(words[0], options, old) if marked and old else None


def wrapped_argv(
    program: str,
    argv: Sequence[str],
    *,
    file: str,
    name: str,
    scope: str = "",
    env: Sequence[str] = (),
    kept: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """The command line that takes the place of `argv`. `scope`: the project whose server it is, in a file
    that holds those of several. `kept`: what undo needs besides."""
    variables = tuple(word for each in env for word in ("--env", each))
    record = _record({"file": file, **({"scope": scope} if scope else {}), **(kept or {})})
    return program, _VERB, _MARK, record, "--name", run_name(name), *variables, _END, *argv


def run_name(name: str) -> str:
    """A server's name as `runner run --name` takes it; other names give other ones. Some have slashes:
    "github.com/org/server" is written as "github.com%2Forg%2Fserver"."""
    usable = _LOOKS_ESCAPED.sub("%25", name)
    usable = "".join(c if c.isprintable() and c != "/" else _escaped(c) for c in usable)
    if usable.startswith("-") or not usable.strip(" ."):
        usable = (_escaped(usable[0]) if usable else "%00") + usable[1:]
    if len(usable) > _LONGEST_NAME:
        digest = fingerprint(name.encode("utf-8", "surrogatepass"))[:16]
        usable = f"{usable[: _LONGEST_NAME - len(digest) - 1]}~{digest}"
    return usable


def _escaped(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


def record_of(options: Sequence[str]) -> dict[str, str]:
    """What --wrapped carries; empty if it cannot be read."""
    words = iter(options)
    for word in words:
        text = next(words, "") if word == _MARK else word.removeprefix(_MARK + "=")
        if word == _MARK or text != word:
            try:
                found = json.loads(text)
            except (ValueError, RecursionError):
                return {}
            return {k: v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}
    return {}


def env_names(options: Sequence[str]) -> tuple[str, ...]:
    """The variables that a wrapped command line passes on or sets."""
    found = [after for word, after in pairwise(options) if word == "--env"]
    found += [word.removeprefix("--env=") for word in options if word.startswith("--env=")]
    return tuple(each.partition("=")[0] for each in found)


def own_options(options: Sequence[str], name: str, variables: Sequence[str]) -> tuple[str, ...]:
    """The options that the author of the entry, or another person, added to those of wrapped_argv.
    `variables`: the names that the entry gives its server a value for; any other name is one of the host's
    own variables."""
    rest = list(options)
    for option, wanted in ((_MARK, None), ("--name", run_name(name))):
        at = rest.index(option) if option in rest else -1
        if 0 <= at < len(rest) - 1 and wanted in (None, rest[at + 1]):
            del rest[at : at + 2]
    found: list[str] = []
    words = iter(rest)
    for word in words:
        if word == "--env":
            value = next(words, "")
            if value not in variables:
                found += [word, value]
        elif not (word.startswith("--env=") and word.removeprefix("--env=") in variables):
            found.append(word)
    return tuple(found)


def _record(values: Mapping[str, str]) -> str:
    """As JSON in which no host finds a variable to fill in: ${X}, $X, {env:X}."""
    pairs = (f"{_literal(name)}:{_literal(value)}" for name, value in values.items())
    return "{" + ",".join(pairs) + "}"


def _literal(text: str) -> str:
    literal = json.dumps(text)
    for character in "${}":
        literal = literal.replace(character, f"\\u{ord(character):04x}")
    return literal
