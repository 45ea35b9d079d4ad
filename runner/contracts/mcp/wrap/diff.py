"""The diff that people see before they agree to a change, without secrets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise

from runner.contracts.mcp.wrap.configuration import Configuration
from runner.contracts.mcp.wrap.redact import HIDDEN, shown_word
from sandbox.document.diagnostic import printable
from sandbox.document.edit.edit import read_spans
from sandbox.document.edit.words import encode_word
from sandbox.spec import KeyPath

Opcode = tuple[str, int, int, int, int]  # as difflib has them

_LONGEST_LINE = 2000
_HASH_COMMENT = re.compile(r"#[^\n]*")
_SLASH_COMMENT = re.compile(r"//[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)


def diff(before: Configuration, after: Configuration) -> list[str]:
    """A unified diff. All values are hidden but those of command lines: entries hold keys and tokens."""
    old, old_starts = _mask(before)
    new, new_starts = _mask(after)
    lines = [f"--- {printable(before.path)}", f"+++ {printable(after.path)}"]
    for hunk in _group(_opcodes(old, new, old_starts, new_starts)):
        first, last = hunk[0], hunk[-1]
        lines.append(f"@@ -{_range(first[1], last[2])} +{_range(first[3], last[4])} @@")
        for tag, i1, i2, j1, j2 in hunk:
            if tag == "equal":
                lines += [" " + line for line in old[i1:i2]]
                continue
            lines += ["-" + line for line in old[i1:i2]]
            lines += ["+" + line for line in new[j1:j2]]
    return [_shown(line) for line in lines]


def _opcodes(
    old: list[str], new: list[str], old_starts: list[int], new_starts: list[int]
) -> Iterator[Opcode]:
    """Opcodes like those of difflib. The entries are compared one by one, because difflib takes quadratic
    time for many similar lines."""
    from difflib import SequenceMatcher

    if len(old_starts) != len(new_starts):
        old_starts, new_starts = [], []
    olds, news = [0, *old_starts, len(old)], [0, *new_starts, len(new)]
    for (i1, i2), (j1, j2) in zip(pairwise(olds), pairwise(news), strict=True):
        if old[i1:i2] == new[j1:j2]:
            yield "equal", i1, i2, j1, j2
            continue
        for tag, a1, a2, b1, b2 in SequenceMatcher(None, old[i1:i2], new[j1:j2], False).get_opcodes():
            yield tag, i1 + a1, i1 + a2, j1 + b1, j1 + b2


def _group(opcodes: Iterable[Opcode]) -> Iterator[list[Opcode]]:
    """Changes with one line around them."""
    group: list[Opcode] = []
    for code in _join(opcodes):
        tag, i1, i2, j1, j2 = code
        if tag != "equal" or (group and i2 - i1 <= 2):
            group.append(code)
            continue
        if group:
            yield [*group, (tag, i1, i1 + 1, j1, j1 + 1)]
        group = [(tag, i2 - 1, i2, j2 - 1, j2)]
    if any(code[0] != "equal" for code in group):
        yield group


def _join(opcodes: Iterable[Opcode]) -> list[Opcode]:
    found: list[Opcode] = []
    for code in opcodes:
        if found and found[-1][0] == code[0] == "equal":
            code = ("equal", found[-1][1], code[2], found.pop()[3], code[4])
        if code[1] < code[2] or code[3] < code[4]:
            found.append(code)
    return found


def _range(start: int, end: int) -> str:
    count = end - start
    return f"{start + 1}" if count == 1 else f"{start + 1 if count else start},{count}"


def _shown(line: str) -> str:
    line = line.expandtabs(4).rstrip("\r\n")
    if len(line) > _LONGEST_LINE:
        return f"{line[:1]}({len(line)} characters, too many to show)"
    return printable(line)


def _mask(config: Configuration) -> tuple[list[str], list[int]]:
    """The lines with keys and command lines; other values and comments are hidden. Also the line numbers at
    which entries begin."""
    text = config.raw.decode("utf-8").removeprefix("\ufeff")
    _, spans = read_spans(text, config.syntax)
    open_words = dict(_command_lines(config))
    kept: list[tuple[int, int, str]] = []  # keys and values: where they stand, and what is shown
    for keys, span in spans.items():
        if span.key_start < span.key_end <= span.start:
            kept.append((span.key_start, span.key_end, text[span.key_start : span.key_end]))
        if span.kind != "scalar" or span.start == span.end:
            continue
        shown = open_words.get(keys, HIDDEN)
        if shown is None:
            kept.append((span.start, span.end, text[span.start : span.end]))
            continue
        new = encode_word(shown, config.syntax) if config.syntax != "yaml" or shown != HIDDEN else HIDDEN
        # The lines keep their numbers.
        kept.append((span.start, span.end, new + "\n" * text.count("\n", span.start, span.end)))
    parts: list[str] = []
    at = 0
    for start, end, shown in sorted(kept):
        if start >= at:
            parts += [_without_comments(text[at:start], config.syntax), shown]
            at = end
    lines = "".join((*parts, _without_comments(text[at:], config.syntax))).split("\n")
    found = sorted(spans[each.keys].key_start for each in config.servers if each.keys in spans)
    starts = [text.count("\n", before, at) for before, at in pairwise((0, *found))]
    return lines, list(accumulate(starts))


def _without_comments(between: str, syntax: str) -> str:
    """The text between keys and values, without comments. Only headers of TOML may contain strings there."""
    pattern, mark = (_SLASH_COMMENT, "//") if syntax in ("json", "jsonc") else (_HASH_COMMENT, "#")
    return pattern.sub(lambda found: f"{mark} {HIDDEN}" + "\n" * found[0].count("\n"), between)


def _command_lines(config: Configuration) -> Iterator[tuple[KeyPath, str | None]]:
    """The values that are shown: None stands for the value as it is, else the words to show."""
    for server in config.servers:
        for number, word in enumerate(server.argv):
            keys = _keys_of(server.command_keys, server.args_keys, number, server.shape == "argv")
            if keys is None:
                continue
            shown = shown_word(word, server.argv[number - 1] if number else "")
            yield keys, None if shown == word else shown


def _keys_of(command: KeyPath, args: KeyPath | None, number: int, is_list: bool) -> KeyPath | None:
    if is_list:
        return (*command, number)
    if number == 0:
        return command
    return (*args, number - 1) if args is not None else None
