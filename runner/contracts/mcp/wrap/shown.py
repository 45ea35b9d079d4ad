"""A change as people see it before they agree: the changed lines, and no secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator

from runner.contracts.mcp.wrap.steps import Configuration
from sandbox.document.diagnostic import printable
from sandbox.document.edit.edit import read_spans
from sandbox.document.edit.words import written
from sandbox.spec import KeyPath

_HIDDEN = "…"
_LONGEST_LINE = 2000
# Options whose value is a secret, and a password in an address.
_SECRET_OPTION = re.compile(r"--?[\w-]*(?:key|token|secret|passw|auth|credential)[\w-]*", re.IGNORECASE)
_ADDRESS_PASSWORD = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]+(?=@)")


def diff(before: Configuration, after: Configuration) -> list[str]:
    """A unified diff. All values are hidden but those of command lines: entries hold keys and tokens."""
    import difflib

    lines = difflib.unified_diff(
        _masked(before).splitlines(),
        _masked(after).splitlines(),
        printable(before.path),
        printable(after.path),
        n=1,
        lineterm="",
    )
    return [_shown(line) for line in lines]


def _shown(line: str) -> str:
    line = line.expandtabs(4).rstrip("\r\n")
    if len(line) > _LONGEST_LINE:
        return f"{line[:1]}({len(line)} characters, too many to show)"
    return printable(line)


def _masked(config: Configuration) -> str:
    text = config.raw.decode("utf-8").removeprefix("\ufeff")
    _, spans = read_spans(text, config.syntax)
    open_words = dict(_command_lines(config))
    parts: list[str] = []
    at = 0
    for keys, span in sorted(spans.items(), key=lambda item: item[1].start):
        if span.kind != "scalar" or span.start < at or span.start == span.end:
            continue
        shown = open_words.get(keys, _HIDDEN)
        if shown is None:
            continue
        new = written(shown, config.syntax) if config.syntax != "yaml" or shown != _HIDDEN else _HIDDEN
        lines = "\n" * text.count("\n", span.start, span.end)  # so that the lines keep their numbers
        parts += [text[at : span.start], new, lines]
        at = span.end
    return "".join((*parts, text[at:]))


def _command_lines(config: Configuration) -> Iterator[tuple[KeyPath, str | None]]:
    """The values that are shown: None stands for the value as it is, else the words to show."""
    for server in config.servers:
        for number, word in enumerate(server.argv):
            keys = _keys_of(server.command_keys, server.args_keys, number, server.shape == "argv")
            if keys is None:
                continue
            previous = server.argv[number - 1] if number else ""
            yield keys, _shown_word(word, previous)


def _keys_of(command: KeyPath, args: KeyPath | None, number: int, is_list: bool) -> KeyPath | None:
    if is_list:
        return (*command, number)
    if number == 0:
        return command
    return (*args, number - 1) if args is not None else None


def _shown_word(word: str, previous: str) -> str | None:
    option, equals, _ = word.partition("=")
    if equals and _SECRET_OPTION.fullmatch(option):
        return f"{option}={_HIDDEN}"
    if _SECRET_OPTION.fullmatch(previous) and not word.startswith("-"):
        return _HIDDEN
    hidden = _ADDRESS_PASSWORD.sub(_HIDDEN, word)
    return hidden if hidden != word else None


def shown_argv(argv: tuple[str, ...]) -> str:
    """A command line on one line."""
    from shlex import quote

    words = [
        _shown_word(word, argv[number - 1] if number else "") or word for number, word in enumerate(argv)
    ]
    return printable(" ".join(word if word == _HIDDEN else quote(word) for word in words))
