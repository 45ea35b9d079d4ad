"""An entry that `runner wrap` has wrapped: `runner run --wrapped JSON … -- OLD ARGV`, and its variables.

A host puts the variables of an entry into the environment of the program that it starts, which is now the
runner. What the configuration says must not act on the runner: LD_PRELOAD runs code in it, RUNNER_POLICY
chooses its policy. So each variable of a wrapped entry has a name that means nothing to any program, and the
runner takes the prefix off for the plugin alone (runner/cli/shared/command.py).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from runner.contracts.configurations import PLUGIN_PREFIX, WRAP_FORMAT
from runner.contracts.mcp.hosts.host import HostServer
from sandbox.cache import fingerprint
from sandbox.policy.policy import steers
from sandbox.speed.value import NamedTuple

_PROGRAM = "runner"
_VERB = "run"
_MARK = "--wrapped"
_END = "--"
_ENV_FILE = "--env-file="
# In the place of the file of variables, which the runner reads now. Some hosts start nothing without a file.
NO_FILE = "/dev/null"
_LONGEST_NAME = 128  # that --name takes
# Options that an entry may have besides those of wrapped_argv: they can only lower limits.
_LIMITS = ("--memory", "--pids", "--cpu", "--cpu-time", "--deadline", "--limit")
_WRITTEN = (_MARK, "--name", "--env", "--env-file")
_ONCE = (_MARK, "--name", "--env-file")
_LOOKS_ESCAPED = re.compile(r"%(?=[0-9A-Fa-f]{2})")


class WrappedLine(NamedTuple):
    program: str  # the path of the runner, as written
    options: tuple[str, ...]  # of `runner run`, as written
    argv: tuple[str, ...]  # the original command and its arguments


def split_wrapped(argv: Sequence[str]) -> WrappedLine | None:
    """The parts of a wrapped command line. None: it is not one, has nothing behind `--`, or repeats an
    option: two parsers might disagree on which one counts."""
    words = tuple(argv)
    if words[1:2] != (_VERB,) or os.path.basename(words[0]) != _PROGRAM or _END not in words:
        return None
    end = words.index(_END)
    options, old = words[2:end], words[end + 1 :]
    names = option_names(options)
    marked = _MARK in names and not any(names.count(each) > 1 for each in _ONCE)
    return WrappedLine(words[0], options, old) if marked and old else None


def option_names(options: Sequence[str]) -> list[str]:
    """Each word that may be the name of an option."""
    return [word.partition("=")[0] for word in options if word.startswith("-")]


def options_fault(options: Sequence[str]) -> str:
    """Returns why `runner run` refuses these options of an entry, or ''. A configuration may have come with a
    project, so its options may not grant anything or name files of the runner."""
    names = option_names(options)
    if twice := next((each for each in _ONCE if names.count(each) > 1), ""):
        return f"{twice} is given twice"
    others = [each for each in names if each not in (*_WRITTEN, *_LIMITS)]
    others += [f"--env {name}=…" for name, equals in _env_words(options) if equals]
    return f"an entry of a configuration may not have {others[0]}" if others else ""


def only_limits(options: Sequence[str]) -> tuple[str, ...]:
    """The options that can only lower a limit, with their values."""
    found: list[str] = []
    for at, word in enumerate(options):
        value = options[at + 1 : at + 2]
        if word in _LIMITS and value and not value[0].startswith("-"):
            found += [word, *value]
        elif "=" in word and word.partition("=")[0] in _LIMITS:
            found.append(word)
    return tuple(found)


def wrapped_argv(
    program: str,
    argv: Sequence[str],
    *,
    file: str,
    name: str,
    scope: str = "",
    passed: Sequence[str] = (),
    env_file: str = "",
    kept: Mapping[str, str] | None = None,
    more: Sequence[str] = (),
) -> tuple[str, ...]:
    """The command line that takes the place of `argv`. `scope`: the project whose server it is, in a file
    that holds those of several. `passed`: names of the host's own variables. `kept`: what undo needs besides.
    `more`: options that a person added."""
    variables = [word for each in passed for word in ("--env", each)]
    if env_file:
        variables.append(_ENV_FILE + env_file)
    record = {"file": file, "format": WRAP_FORMAT, **({"scope": scope} if scope else {}), **(kept or {})}
    return program, _VERB, _MARK, _record(record), "--name", run_name(name), *variables, *more, _END, *argv


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
    """The parsed value of --wrapped; empty if it cannot be read."""
    words = iter(options)
    for word in words:
        text = next(words, "") if word == _MARK else word.removeprefix(_MARK + "=")
        if word == _MARK or text != word:
            if any(c in text[1:-1] for c in "${}"):  # what a host fills in makes another record of it
                return {}
            try:
                found = json.loads(text)
            except (ValueError, RecursionError):
                return {}
            return {k: v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}
    return {}


def is_outdated(old: WrappedLine) -> bool:
    """Whether an earlier version wrapped it, which did not rename the variables."""
    return record_of(old.options).get("format") != WRAP_FORMAT


def plugin_env(server: HostServer) -> tuple[tuple[str, str, str], ...]:
    """The variables that the plugin of an entry gets: the key in the table, the name, the value."""
    old = split_wrapped(server.argv)
    if old is None or is_outdated(old):
        return tuple((name, name, value) for name, value in server.env)
    return tuple(
        (key, key.removeprefix(PLUGIN_PREFIX), value)
        for key, value in server.env
        if key.startswith(PLUGIN_PREFIX)
    )


def plugin_env_file(server: HostServer) -> str:
    """The file of variables that the plugin of an entry gets; empty: none."""
    old = split_wrapped(server.argv)
    if old is None or is_outdated(old):
        return server.env_file
    return next((word.removeprefix(_ENV_FILE) for word in old.options if word.startswith(_ENV_FILE)), "")


def acting_names(server: HostServer, names: Sequence[str]) -> tuple[str, ...]:
    """Variables of a wrapped entry that its host gives the runner itself. `names`: of its table."""
    found = tuple(name for name in names if not name.startswith(PLUGIN_PREFIX))
    return found if server.env_file in ("", NO_FILE) else (*found, "envFile")


def acts_at_start(name: str) -> bool:
    """Whether a variable that a host passes on by its own name acts on the runner before that can drop it: on
    the loader, the C library, sh or Python."""
    return steers(name) or name in ("ENV", "IFS")


def env_names(options: Sequence[str]) -> tuple[str, ...]:
    """The variables that a wrapped command line passes on or sets."""
    return tuple(name for name, _ in _env_words(options))


def _env_words(options: Sequence[str]) -> list[tuple[str, str]]:
    """The names, each with the "=" behind it if a value follows."""
    found = [after for word, after in pairwise(options) if word == "--env"]
    found += [word.removeprefix("--env=") for word in options if word.startswith("--env=")]
    return [each.partition("=")[:2] for each in found]


def acts_on_runner(name: str) -> bool:
    """Whether a variable affects a runner that an entry starts without --wrapped."""
    return acts_at_start(name) or name.startswith(("RUNNER_", "XDG_")) or name in ("HOME", "PATH", "TMPDIR")


def own_options(
    options: Sequence[str], name: str, variables: Sequence[str], env_file: str
) -> tuple[str, ...]:
    """The options that the author of the entry, or another person, added to those of wrapped_argv.
    `variables`: the names that the entry gives its server a value for; any other name is one of the host's
    own variables. `env_file`: of the entry, as it is written now."""
    rest = list(options)
    for option, wanted in ((_MARK, None), ("--name", run_name(name))):
        at = rest.index(option) if option in rest else -1
        if 0 <= at < len(rest) - 1 and wanted in (None, rest[at + 1]):
            del rest[at : at + 2]
    if env_file == NO_FILE:
        at = next((at for at, word in enumerate(rest) if word.startswith(_ENV_FILE)), -1)
        if at >= 0:
            del rest[at]
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
    """The record as JSON, escaped so that no host expands something in it: ${X}, $X, {env:X}."""
    pairs = (f"{_literal(name)}:{_literal(value)}" for name, value in values.items())
    return "{" + ",".join(pairs) + "}"


def _literal(text: str) -> str:
    literal = json.dumps(text)
    for character in "${}":
        literal = literal.replace(character, f"\\u{ord(character):04x}")
    return literal
