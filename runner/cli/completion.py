"""runner completion: a script for the shell, made from the options themselves."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from runner.cli import VERBS, verb_parser

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


def _options(verb: str) -> list[tuple[str, tuple[str, ...]]]:
    """Each long option with the values it chooses from."""
    found = []
    for action in verb_parser(verb)._actions:
        for option in action.option_strings:
            if option.startswith("--"):
                found.append((option, tuple(str(choice) for choice in action.choices or ())))
    return found


def _words(verb: str) -> tuple[str, ...]:
    if verb == "completion":
        return _SHELLS
    if verb == "schema":
        from runner.manifest import contract_names

        return tuple(contract_names())
    return ()


def _bash() -> str:
    cases: list[str] = []
    for verb in VERBS:
        for option, choices in _options(verb):
            if choices:
                cases.append(f'    "{verb} {option}") words="{" ".join(choices)}" ;;')
    for verb in VERBS:
        words = " ".join((*(option for option, _ in _options(verb)), *_words(verb)))
        cases.append(f'    "{verb} "*) words="{words}"; files=yes ;;')
    return "\n".join(
        (
            "# bash completion for runner",
            "_runner() {",
            '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words="" files=""',
            "  if ((COMP_CWORD == 1)); then",
            f'    words="{" ".join(VERBS)} --help --version"',
            '  else case "${COMP_WORDS[1]} $before" in',
            *cases,
            "  esac; fi",
            '  COMPREPLY=($(compgen -W "$words" -- "$word"))',
            '  if [[ $files && "$word" != -* ]]; then COMPREPLY+=($(compgen -f -- "$word")); fi',
            "}",
            "complete -o filenames -F _runner runner",
            "",
        )
    )


def _zsh() -> str:
    return "autoload -Uz bashcompinit && bashcompinit\n" + _bash()


def _fish() -> str:
    lines = ["# fish completion for runner"]
    for verb in VERBS:
        lines.append(f"complete -c runner -n __fish_use_subcommand -a {verb}")
        condition = f"'__fish_seen_subcommand_from {verb}'"
        for option, choices in _options(verb):
            values = f" -x -a '{' '.join(choices)}'" if choices else ""
            lines.append(f"complete -c runner -n {condition} -l {option[2:]}{values}")
        for word in _words(verb):
            lines.append(f"complete -c runner -n {condition} -a {word}")
    return "\n".join(lines) + "\n"
