"""runner completion: a script for the shell, made from the options themselves.

By hand and not with shtab (tried with 1.13): there an option completes words or files, but --policy takes the
name of a policy or a file; and it puts a space behind `memory=`, where the value of --limit goes on. Both can
be had from it only with functions written by hand for each shell, which would be as long as this module.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from runner.cli import all_verbs, verb_parser
from runner.contracts.registry import contract_names, contract_options
from sandbox.policy.load import policy_names
from sandbox.policy.policy import LIMIT_NAMES
from sandbox.value import NamedTuple

if TYPE_CHECKING:
    import argparse

NAME = "completion"
HELP = "print a completion script for bash, zsh or fish"
EXAMPLE = 'eval "$(runner completion bash)"'

_SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SHELLS)


def run(args: argparse.Namespace) -> int:
    script = {"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell]()
    sys.stdout.write(script)
    return 0


class _Option(NamedTuple):
    name: str
    takes_value: bool
    words: tuple[str, ...] = ()  # to choose its value from
    files: bool = False  # its value may be the name of a file


def _options(verb: str) -> list[_Option]:
    found = []
    files = {*_FILES, *(flag for flag, option in contract_options(verb).items() if option.names_file)}
    for action in verb_parser(verb)._actions:
        for name in action.option_strings:
            if name.startswith("--"):
                words = tuple(map(str, action.choices)) if action.choices else _values(name)
                found.append(_Option(name, action.nargs != 0, words, name in files))
    return found


# Options whose value may be a file or a directory.
_FILES = ("--policy", "--report", "--state-dir", "--key", "--trust")


def _values(option: str) -> tuple[str, ...]:
    if option == "--policy":
        return policy_names()
    if option == "--contract":
        return contract_names()
    if option == "--limit":
        return tuple(f"{name}=" for name in LIMIT_NAMES)
    return ()


def _operands(verb: str) -> tuple[tuple[str, ...], bool]:
    """What a verb takes besides options: words to choose from, and whether it takes files."""
    operands = [action for action in verb_parser(verb)._actions if not action.option_strings]
    if any(action.dest == "contract" for action in operands):
        return contract_names(), len(operands) > 1
    choices = tuple(str(choice) for action in operands for choice in action.choices or ())
    return choices, any(action.choices is None for action in operands)


def _bash() -> str:
    cases: list[str] = []
    for verb in all_verbs():
        for option in _options(verb):
            if option.takes_value:
                cases.append(_case(f'"{verb} {option.name}"', option.words, option.files))
    for verb in all_verbs():
        words, files = _operands(verb)
        cases.append(_case(f'"{verb} "*', (*(option.name for option in _options(verb)), *words), files))
    return "\n".join(
        (
            "# bash completion for runner",
            "_runner() {",
            '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words="" files=""',
            "  if ((COMP_CWORD == 1)); then",
            f'    words="{" ".join(all_verbs())} --help --version"',
            '  else case "${COMP_WORDS[1]} $before" in',
            *cases,
            "  esac; fi",
            '  COMPREPLY=($(compgen -W "$words" -- "$word"))',
            '  if [[ $files && "$word" != -* ]]; then COMPREPLY+=($(compgen -f -- "$word")); fi',
            "  # A word that ends in = goes on: no space after it, no backslash before it.",
            "  if [[ ${COMPREPLY[0]} == *= ]]; then compopt -o nospace +o filenames 2>/dev/null; fi",
            "}",
            "complete -o filenames -F _runner runner",
            "",
        )
    )


def _case(pattern: str, words: tuple[str, ...], files: bool) -> str:
    return f'    {pattern}) words="{" ".join(words)}"{"; files=yes" if files else ""} ;;'


def _zsh() -> str:
    return "autoload -Uz bashcompinit && bashcompinit\n" + _bash()


def _fish() -> str:
    lines = ["# fish completion for runner", "complete -c runner -n __fish_use_subcommand -f"]
    for verb in all_verbs():
        lines.append(f"complete -c runner -n __fish_use_subcommand -a {verb}")
        condition = f"'__fish_seen_subcommand_from {verb}'"
        words, files = _operands(verb)
        if not files:
            lines.append(f"complete -c runner -n {condition} -f")
        for option in _options(verb):
            # -r: the next word is its value, -x: and no file.
            kind = "" if not option.takes_value else " -r" if option.files else " -x"
            values = f" -a '{' '.join(option.words)}'" if option.words else ""
            lines.append(f"complete -c runner -n {condition} -l {option.name[2:]}{kind}{values}")
        for word in words:
            lines.append(f"complete -c runner -n {condition} -a {word}")
    return "\n".join(lines) + "\n"
