"""runner completion: a script for the shell, made from the options themselves.

By hand and not with shtab (tried with 1.13): there an option completes words or files, but --policy takes the
name of a policy or a file; and it puts a space behind `memory=`, where the value of --limit goes on. Both can
be had from it only with functions written by hand for each shell, which would be as long as this module.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING

from runner.cli import WITH_ACTIONS, all_verbs, verb_help, verb_parser
from runner.cli.shared.actions import actions_of
from runner.contracts.registry import contract_names, contract_options
from sandbox.policy.load import policy_names
from sandbox.policy.policy import LIMIT_NAMES
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    import argparse

NAME = "completion"
EXAMPLE = 'eval "$(runner completion bash)"'

_SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    import argparse

    parser.add_argument("shell", choices=_SHELLS, nargs="?", help="the shell that you use")
    parser.usage = f"{parser.prog} {{{','.join(_SHELLS)}}}"
    # For the scripts themselves: prints the servers of the manifest among the words typed so far.
    parser.add_argument("--servers", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    # The same for the tools of its plugin.
    parser.add_argument("--tools", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    if args.servers is not None:
        return _print_servers(args.servers)
    if args.tools is not None:
        return _print_tools(args.tools)
    if args.shell is None:
        verb_parser(NAME).error("the following arguments are required: shell")
    script = {"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell]()
    sys.stdout.write(script)
    return 0


def _print_servers(words: list[str]) -> int:
    """One name per line, of the first word that is a manifest. A shell shows no message here."""
    from runner.manifest.load import servers_at

    for word in words:
        path = os.path.expanduser(word)
        if not word.startswith("-") and os.path.exists(path) and (names := servers_at(path)):
            print("\n".join(name for name in names if name.isprintable()))
            break
    return 0


def _print_tools(words: list[str]) -> int:
    """One name per line, of the plugin that the words choose; nothing if there is no manifest yet, or the
    tool is there too."""
    from runner.cli.shared.seen_tools import known_tools
    from runner.manifest.load import load

    named = [at for at, word in enumerate(words) if word == "--server"]
    server = next((words[at + 1] for at in named if at + 1 < len(words)), None)
    for word in words:
        path = os.path.expanduser(word)
        if not word.startswith("-") and word != server and os.path.exists(path):
            plugin = load(path, server=server).plugin
            for name in () if plugin is None else known_tools(plugin):
                print(name)
            break
    return 0


class _Option(NamedTuple):
    name: str
    takes_value: bool
    about: str = ""
    words: tuple[str, ...] = ()  # to choose its value from
    files: bool = False  # its value may be the name of a file
    servers: bool = False  # its value is one of the manifest's servers


@functools.cache
def _parser(command: str) -> argparse.ArgumentParser:
    verb, _, action = command.partition(" ")
    return actions_of(_parser(verb))[action] if action else verb_parser(verb)


def _commands() -> list[str]:
    """Every action with its verb, then every verb."""
    actions = [f"{verb} {action}" for verb in WITH_ACTIONS for action in actions_of(_parser(verb))]
    return [*actions, *all_verbs()]


def _options(command: str) -> list[_Option]:
    import argparse

    found = []
    verb = command.partition(" ")[0]
    files = {*_FILES, *(flag for flag, option in contract_options(verb).items() if option.names_file)}
    parser = _parser(command)
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        about = parser._get_formatter()._expand_help(action) if action.help else ""
        named = action.metavar in ("PATH", "FILE", "DIR")
        for name in action.option_strings:
            if name.startswith("--"):
                words = tuple(map(str, action.choices)) if action.choices else _values(name)
                takes = action.nargs not in (0, "?")
                told = " ".join(about.split()).partition(";")[0]
                found.append(
                    _Option(name, takes, told, words, named or name in files, name == "--server" and takes)
                )
    return found


# Options whose value may be a file or a directory.
_FILES = ("--policy", "--report", "--events", "--state-dir", "--key", "--trust")


def _values(option: str) -> tuple[str, ...]:
    if option == "--policy":
        return policy_names()
    if option == "--contract":
        return contract_names()
    if option == "--limit":
        return tuple(f"{name}=" for name in LIMIT_NAMES)
    return ()


def _operands(command: str) -> tuple[tuple[str, ...], bool]:
    """What it takes besides options: words to choose from, and whether it takes files."""
    operands = [action for action in _parser(command)._actions if not action.option_strings]
    if any(action.dest == "contract" for action in operands):
        return contract_names(), len(operands) > 1
    choices = tuple(str(choice) for action in operands for choice in action.choices or ())
    return choices, any(action.choices is None for action in operands)


# --- bash --------------------------------------------------------------------------------------------------


def _bash() -> str:
    cases: list[str] = []
    for command in (commands := _commands()):
        for option in _options(command):
            if option.servers:
                cases.append(f'    "{command} {option.name}") names=servers ;;')
            elif option.takes_value:
                cases.append(_case(f'"{command} {option.name}"', option.words, option.files))
    for command in commands:
        words, files = _operands(command)
        cases.append(_case(f'"{command} "*', (*(option.name for option in _options(command)), *words), files))
    return "\n".join(
        (
            "# bash completion for runner",
            "_runner() {",
            '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words="" files=""',
            '  local names="" each quoted at verb="${COMP_WORDS[1]}"',
            "  # bash takes the = of --server=NAME for a word.",
            '  if [[ "$word" == = ]]; then word=""',
            '  elif [[ "$before" == = ]]; then before="${COMP_WORDS[COMP_CWORD-2]}"; fi',
            "  # Behind -- stands another command.",
            "  for ((at = 2; at < COMP_CWORD; at++)); do",
            '    if [[ "${COMP_WORDS[at]}" == -- ]]; then',
            "      if ((at + 1 == COMP_CWORD)); then words=-c; fi",
            '      mapfile -t COMPREPLY < <(compgen ${words:--f} -- "$word")',
            "      return",
            "    fi",
            "  done",
            f'  if ((COMP_CWORD > 2)) && [[ " {" ".join(WITH_ACTIONS)} " == *" $verb "* ]]; then',
            '    verb+=" ${COMP_WORDS[2]}"',
            "  fi",
            "  if ((COMP_CWORD == 1)); then",
            f'    words="{" ".join(all_verbs())} --help --version"',
            '  else case "$verb $before" in',
            *cases,
            "  esac; fi",
            '  if [[ ! $names && "${COMP_WORDS[1]}" == call && "$word" != -* ]]; then names=tools; fi',
            "  COMPREPLY=()",
            "  if [[ $names ]]; then",
            "    while IFS= read -r each; do",
            "      # A name comes with a project. As the name of a file that does not exist, bash would not",
            "      # quote all of it, and then run what stands there.",
            '      printf -v quoted %q "$each"',
            '      if [[ "$each" == "$word"* || "$quoted" == "$word"* ]]; then COMPREPLY+=("$quoted"); fi',
            '    done < <("${COMP_WORDS[0]}" completion "--$names" "${COMP_WORDS[@]:2}" 2>/dev/null)',
            "    if [[ $names == servers || ${COMPREPLY[0]} ]]; then",
            "      compopt +o filenames 2>/dev/null",
            "      return",
            "    fi",
            "  fi",
            '  COMPREPLY=($(compgen -W "$words" -- "$word"))',
            '  if [[ $files && "$word" != -* ]]; then',
            '    while IFS= read -r each; do COMPREPLY+=("$each"); done < <(compgen -f -- "$word")',
            "  fi",
            "  # A word that ends in = goes on: no space after it, no backslash before it.",
            "  if [[ ${COMPREPLY[0]} == *= ]]; then compopt -o nospace +o filenames 2>/dev/null; fi",
            "}",
            "complete -o filenames -F _runner runner",
            "",
        )
    )


def _case(pattern: str, words: tuple[str, ...], files: bool) -> str:
    return f'    {pattern}) words="{" ".join(words)}"{"; files=yes" if files else ""} ;;'


# --- zsh ---------------------------------------------------------------------------------------------------


def _zsh() -> str:
    values: list[str] = []
    verbs: list[str] = []
    for command in _commands():
        options = _options(command)
        for option in options:
            if option.takes_value:
                values.append(f"    '{command} {option.name}') {_zsh_values(option)}; return ;;")
        words, files = _operands(command)
        told = " ".join(_described(option.name, option.about) for option in options)
        operands = [f"compadd -- {' '.join(words)}"] if words else []
        operands += [_zsh_names("tools")] if command == "call" else []
        operands += ["_files"] if files else []
        verbs += [
            f"    {_zsh_pattern(command)})",
            f"      told=({told})",
            "      if [[ $PREFIX == -* ]]; then _describe -o option told",
            f"      else {'; '.join(operands) or ':'}; fi ;;",
        ]
    names = " ".join(_described(verb, verb_help(verb)) for verb in all_verbs())
    return "\n".join(
        (
            "#compdef runner",
            "_runner() {",
            "  local -a told",
            "  local dashes=${words[(i)--]}",
            "  if (( dashes < CURRENT )); then  # behind -- stands another command",
            '    words=("${(@)words[dashes + 1, -1]}"); (( CURRENT -= dashes )); _normal; return',
            "  fi",
            "  if (( CURRENT == 2 )); then",
            f"    told=({names}); _describe verb told; return",
            "  fi",
            '  local verb="${words[2]}"',
            f'  if (( CURRENT > 3 )) && [[ " {" ".join(WITH_ACTIONS)} " == *" $verb "* ]]; then',
            '    verb+=" ${words[3]}"',
            "  fi",
            '  case "$verb ${words[CURRENT - 1]}" in',
            *values,
            "  esac",
            '  case "$verb" in',
            *verbs,
            "  esac",
            "}",
            "# Read by eval: tell the shell. Read from a folder of fpath: be the function.",
            'if [[ $funcstack[1] == _runner ]]; then _runner "$@"',
            "else",
            "  (( $+functions[compdef] )) || { autoload -Uz compinit && compinit -D }",
            "  compdef _runner runner",
            "fi",
            "",
        )
    )


def _zsh_pattern(command: str) -> str:
    return f"{command}|'{command} '*" if command in WITH_ACTIONS else _quoted(command)


def _zsh_values(option: _Option) -> str:
    if option.servers:
        return _zsh_names("servers")
    tail = "-S '' " if any(word.endswith("=") for word in option.words) else ""
    acts = [f"compadd {tail}-- {' '.join(option.words)}"] if option.words else []
    acts += ["_files"] if option.files else []
    return "; ".join(acts) or ":"


def _zsh_names(what: str) -> str:
    asked = f'"${{words[1]}}" completion --{what} "${{(@Q)words[3, -1]}}" 2>/dev/null'
    return f'told=("${{(@f)$({asked})}}"); compadd -- ${{told:#}}'


def _described(name: str, about: str) -> str:
    return _quoted(f"{name}:{about}" if about else name)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# --- fish --------------------------------------------------------------------------------------------------


def _fish() -> str:
    lines = [
        "# fish completion for runner",
        "function __runner_servers",
        "    set -l typed (commandline -opc)",
        "    $typed[1] completion --servers $typed[3..-1] 2>/dev/null",
        "end",
        "function __runner_tools",
        "    set -l typed (commandline -opc)",
        "    $typed[1] completion --tools $typed[3..-1] 2>/dev/null",
        "end",
        "complete -c runner -n __fish_use_subcommand -f",
    ]
    for verb in all_verbs():
        about = _fish_quoted(verb_help(verb))
        lines.append(f"complete -c runner -n __fish_use_subcommand -a {verb} -d {about}")
    for command in _commands():
        verb, _, action = command.partition(" ")
        words, files = _operands(command)
        seen = f"__fish_seen_subcommand_from {verb}"
        if action:
            seen += f"; and __fish_seen_subcommand_from {action}"
        elif verb in WITH_ACTIONS:
            seen += f"; and not __fish_seen_subcommand_from {' '.join(words)}"
        condition = f"'{seen}'"
        if not files:
            lines.append(f"complete -c runner -n {condition} -f")
        for option in _options(command):
            # -r: the next word is its value, -x: and no file.
            kind = "" if not option.takes_value else " -r" if option.files else " -x"
            values = f" -a '{' '.join(option.words)}'" if option.words else ""
            if option.servers:
                values = " -a '(__runner_servers)'"
            about = f" -d {_fish_quoted(option.about)}" if option.about else ""
            lines.append(f"complete -c runner -n {condition} -l {option.name[2:]}{kind}{values}{about}")
        actions = actions_of(_parser(command))
        for word in (*words, *(["'(__runner_tools)'"] if verb == "call" else [])):
            about = f" -d {_fish_quoted(actions[word].description or '')}" if word in actions else ""
            lines.append(f"complete -c runner -n {condition} -a {word}{about}")
    return "\n".join(lines) + "\n"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
