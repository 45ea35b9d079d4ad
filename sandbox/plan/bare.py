"""Show a launch as a command without the runner: a line for bash, a script for sh, a vector for programs.

    command_line    one line for bash: for people to read and try
    script          for sh, with all of the cage that can be had without the runner
    vector          bwrap's path and arguments, for programs

Each formats a BareCommand, which `bare_command` makes from a plan.

Untrusted text, such as the name of a file, is quoted and safe on a terminal. Values of the caller's own
environment may be secret: only the names of these variables are shown. The script passes no value on a
command line, where everybody on the machine could read it.
"""

from __future__ import annotations

import os
import re
from shlex import quote
from typing import TYPE_CHECKING

from sandbox.plan.bwrap import flat, head, tail, without_source
from sandbox.plan.plan import Bind, LaunchPlan, Operation, Text
from sandbox.spec import INSIDE_ID, MemoryFile
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


class CommandFile(NamedTuple):
    """A file that the caller of a bare command has to open under this descriptor number."""

    number: int
    file: str = ""  # its name on the host
    content: bytes | None = None  # if it has no name on the host
    secret: bool = False  # the caller has to supply the content; `file` is a name for it


class BareCommand(NamedTuple):
    """The same launch without the runner, with paths where a launch has descriptors.

    The runner itself does not use it, because a path can be replaced between check and use. What the runner
    mounts idmapped is a plain bind here. There is no gate, so no host can be reached.
    """

    program: str
    options: tuple[str, ...]  # without the variables
    env: tuple[tuple[str, str | None], ...]  # None: the caller's own value
    argv: tuple[str, ...]
    files: tuple[CommandFile, ...]


def bare_command(plan: LaunchPlan, bwrap: str, seccomp_file: str, first: int = 10) -> BareCommand:
    """`first`: the lowest descriptor number for files. The seccomp filter has it, if there is one."""
    files = [CommandFile(first, seccomp_file)] if plan.layers.seccomp_filter else []
    filters = ("--seccomp", str(first)) if files else ()
    texts: dict[str, int] = {}
    for op in plan.operations:
        if isinstance(op, Text | MemoryFile):
            texts[op.dest] = number = first + len(files)
            if isinstance(op, Text):
                files.append(CommandFile(number, content=op.content))
            else:
                files.append(CommandFile(number, op.secret or os.path.basename(op.dest), secret=True))
    options = (
        *head(plan, plan.share_network),
        *filters,
        *flat(_with_paths(op, texts) for op in plan.operations),
        *tail(plan._replace(env=())),
    )
    return BareCommand(bwrap, options, plan.env, plan.argv, tuple(files))


def _with_paths(op: Operation, texts: Mapping[str, int]) -> tuple[str, ...]:
    match op:
        case Bind(dest, real, writable, _):
            return ("--bind" if writable else "--ro-bind", real, dest)
        case _:
            return without_source(op, texts)


class Ulimit(NamedTuple):
    """A resource limit, as for the shell's ulimit."""

    letter: str
    soft: int
    hard: int


class VariableValue(NamedTuple):
    """A part of a word that is the value of a variable."""

    variable: str


# The highest descriptor number that every sh can open.
_LAST_NUMBER = 9
# Descriptor numbers in the script: the plugin's stdin in the meantime, and bwrap's options.
_STDIN, _OPTIONS = _LAST_NUMBER, 3
FIRST_NUMBER = 4


def split_hidden(word: str, hidden: Mapping[str, str]) -> list[str | VariableValue]:
    """Split a word at the values of `hidden` (by name of the variable), and replace each by a
    VariableValue."""
    if not any(value in word for value in hidden.values()):
        return [word]
    names = {value: name for name, value in hidden.items()}
    longest_first = sorted(names, key=len, reverse=True)
    found = re.split(f"({'|'.join(map(re.escape, longest_first))})", word)
    return [VariableValue(names[part]) if part in names else part for part in found if part]


# --- bash ---------------------------------------------------------------------------------------------------


def command_line(command: BareCommand) -> str:
    """One line for bash. A file that exists only in memory is read from one named after its secret."""
    options = map(_bash_word, (command.program, *command.options))
    variables = (
        f"--setenv {_bash_word(name)} " + (f'"${name}"' if value is None else _bash_word(value))
        for name, value in command.env
    )
    redirections = []
    for each in command.files:
        if each.content is None:
            redirections.append(f"{each.number}<{_bash_word(each.file)}")
        else:
            content = each.content.decode(errors="replace")
            redirections.append(f"{each.number}< <(printf %s {_bash_word(content)})")
    return " ".join((*options, *variables, "--", *map(_bash_word, command.argv), *redirections))


def _bash_word(word: str) -> str:
    # $'…' is bash's notation for unprintable characters.
    return quote(word) if word.isprintable() else f"$'{_escaped(word)}'"


def _escaped(word: str) -> str:
    """Escape for $'…' of bash and for the format of printf: special and unprintable characters become octal
    numbers."""
    return "".join(
        c if c.isprintable() and c not in "'\\%" else "".join(f"\\{byte:03o}" for byte in os.fsencode(c))
        for c in word
    )


# --- sh -----------------------------------------------------------------------------------------------------


def script(
    command: BareCommand, remarks: Sequence[str], bounds: Iterable[Ulimit], hidden: Mapping[str, str]
) -> str:
    """A script for sh. `remarks`: comment lines at its top. The numbers of `command.files` start with
    FIRST_NUMBER."""

    def word(text: str) -> str:
        return "".join(
            f'"${part.variable}"' if isinstance(part, VariableValue) else _sh_word(part)
            for part in split_hidden(text, hidden)
        ) or quote("")

    numbers = [each.number for each in command.files]
    posix = max(numbers, default=0) <= _LAST_NUMBER
    lines = ["#!/bin/sh"] if posix else ["#!/bin/bash", "# Not sh: that one opens no descriptor above 9."]
    lines += [f"# {_comment(remark)}".rstrip() for remark in remarks]
    lines += ["set -u", "unset IFS" if posix else "unset IFS; set -o posix", ""]
    if rows := [f"bound -{each.letter} {each.soft} {each.hard}" for each in bounds]:
        # ulimit fails only where a lower limit is already in force.
        lines += ['bound() { ulimit -S "$1" "$2" && ulimit -H "$1" "$3"; } 2>/dev/null', *rows, ""]
    lines += ["options() {", "    printf '%s\\0' \\"]
    groups = [*_grouped(command.options, word), *_variables(command, word)]
    lines += [f"        {group} \\" for group in groups[:-1]]
    lines += [f"        {groups[-1]}", "}", ""]
    lines += [
        "# Through a pipe: a command line can be read by everybody on this machine.",
        f"exec {_STDIN}<&0",
        "options | {",
        f"    exec {_OPTIONS}<&0 0<&{_STDIN} {_STDIN}<&-",
    ]
    for each in command.files:
        if each.content is None:
            lines.append(f"    exec {each.number}<{word(each.file)}")
        else:
            content = _escaped(os.fsdecode(each.content).rstrip("\n"))
            lines += [f"    exec {each.number}<<END", f"$(printf '{content}')", "END"]
    drop = f"/usr/bin/setpriv --reuid={INSIDE_ID} --regid={INSIDE_ID} --clear-groups --"
    lines += [
        f'    set -- {word(command.program)} --args {_OPTIONS} -- {" ".join(map(word, command.argv))} "$@"',
        # With root's uid the plugin could leave setuid-root programs behind.
        f'    case $(/usr/bin/id -u) in 0 | "") set -- {drop} "$@" ;; esac',
        '    exec /usr/bin/env -i "$@"',
        "}",
    ]
    return "\n".join(lines) + "\n"


def _sh_word(text: str) -> str:
    if text.isprintable():
        return quote(text)
    ends = len(text) - len(text.rstrip("\n"))  # $(…) drops them
    return f"\"$(printf '{_escaped(text.rstrip(chr(10)))}')\"" + (quote("\n" * ends) if ends else "")


def _grouped(options: Sequence[str], word: Callable[[str], str]) -> Iterator[str]:
    """Each option with its values, for a line of its own."""
    group: list[str] = []
    for option in options:
        if option.startswith("--") and group and group[-2:-1] not in (["--perms"], ["--size"]):
            yield " ".join(group)
            group = []
        group.append(word(option))
    yield " ".join(group)


def _variables(command: BareCommand, word: Callable[[str], str]) -> Iterator[str]:
    for name, value in command.env:
        if value is None:  # only if the caller has it
            yield f'${{{name}+--setenv {name} "${name}"}}'
        else:
            yield f"--setenv {word(name)} {word(value)}"


def _comment(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


# --- a vector -----------------------------------------------------------------------------------------------


def vector(command: BareCommand) -> list[str]:
    """bwrap's path and arguments, without the caller's own variables."""
    variables = [("--setenv", name, value) for name, value in command.env if value is not None]
    words = (word for group in variables for word in group)
    return [command.program, *command.options, *words, "--", *command.argv]
