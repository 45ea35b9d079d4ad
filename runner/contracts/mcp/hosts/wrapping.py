"""The command line of an entry that `runner wrap` has wrapped: `runner run --wrapped JSON … -- OLD ARGV`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise

from runner.contracts.mcp.hosts.host import HostServer
from sandbox.cache import fingerprint
from sandbox.value import NamedTuple

_PROGRAM = "runner"
_VERB = "run"
_MARK = "--wrapped"
_END = "--"
_LONGEST_NAME = 128  # that --name takes


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
    env: Sequence[str] = (),
    kept: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """The command line that takes the place of `argv`. `kept`: what undo needs besides."""
    variables = tuple(word for each in env for word in ("--env", each))
    record = _record({"file": file, **(kept or {})})
    return program, _VERB, _MARK, record, "--name", run_name(name), *variables, _END, *argv


def run_name(name: str) -> str:
    """A server's name as `runner run --name` takes it. Some have slashes: "github.com/org/server"."""
    usable = "".join(c if c.isprintable() and c != "/" else "_" for c in name)[:_LONGEST_NAME]
    if usable.startswith("-") or not usable.strip(" ."):
        usable = "_" + usable[1:]
    return usable


def mark_of(server: HostServer) -> str:
    """Tells apart servers of one file that run_name gives one name, and those of several projects."""
    parts = [server.scope, "" if run_name(server.name) == server.name else server.name]
    return fingerprint(*(os.fsencode(part) for part in parts if part))[:32] if any(parts) else ""


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


def own_options(options: Sequence[str]) -> tuple[str, ...]:
    """The options that a person, or whoever wrote the entry, added to those of wrapped_argv."""
    rest = list(options)
    for name in (_MARK, "--name"):
        if name in rest:
            at = rest.index(name)
            del rest[at : at + 2]
    while "--env" in rest[:-1] and "=" not in rest[rest.index("--env") + 1]:
        at = rest.index("--env")
        del rest[at : at + 2]
    return tuple(rest)


def _record(values: Mapping[str, str]) -> str:
    """As JSON in which no host finds a variable to fill in: ${X}, $X, {env:X}."""
    pairs = (f"{_literal(name)}:{_literal(value)}" for name, value in values.items())
    return "{" + ",".join(pairs) + "}"


def _literal(text: str) -> str:
    literal = json.dumps(text)
    for character in "${}":
        literal = literal.replace(character, f"\\u{ord(character):04x}")
    return literal
