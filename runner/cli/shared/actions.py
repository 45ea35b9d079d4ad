"""Actions of a verb, as in `runner ctl drain`: each has options, a usage and a help of its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

AddArguments = Callable[[Any], object]
# Each action: one line about it, and what adds its arguments.
Actions = Mapping[str, tuple[str, Sequence[AddArguments]]]


def add_actions(parser: argparse.ArgumentParser, actions: Actions) -> None:
    found = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, prog=parser.prog, help=argparse.SUPPRESS
    )
    for name, (line, arguments) in actions.items():
        action = found.add_parser(
            name, description=line, formatter_class=parser.formatter_class, allow_abbrev=False
        )
        for add in arguments:
            add(action)
    lines = "\n".join(f"  {name:<12} {line}" for name, (line, _) in actions.items())
    parser.usage = f"{parser.prog} ACTION …"
    parser.epilog = "\n\n".join(
        filter(
            None,
            (
                f"actions:\n{lines}",
                parser.epilog,
                f"{parser.prog} ACTION --help shows the options of an action.",
            ),
        )
    )


def argument(
    name: str, metavar: str | None, about: str, **more: Any
) -> Callable[[argparse.ArgumentParser], object]:
    """What adds one argument, for a table of actions."""
    return lambda parser: parser.add_argument(name, metavar=metavar, help=about, **more)


def actions_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The parser of each action; none for most verbs."""
    found = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return next((each.choices for each in found), {})


def action_help(parser: argparse.ArgumentParser, action: str) -> str:
    """Ends with a usage error if there is no such action."""
    if action not in actions_of(parser):
        parser.parse_args([action])
    return actions_of(parser)[action].format_help()


def parse_action(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse the words behind the verb. Options may also stand in front of the action."""
    actions = actions_of(parser)
    at = next(_operands(actions.values(), words), len(words))
    action = actions.get("".join(words[at : at + 1]))
    if action is None:
        shown = [word for word in words[:at] if word in ("-h", "--help")]
        return parser.parse_args(shown or words[at : at + 1])  # ends here
    args = argparse.Namespace(action=words[at])
    rest = [*words[:at], *words[at + 1 :]]
    _, unknown = action.parse_known_intermixed_args(rest, args)
    if unknown:
        owners = _owners(parser, unknown)
        action.error(f"unrecognized arguments: {' '.join(unknown)}{owners}")
    for each in action._get_positional_actions():
        if getattr(args, each.dest) == "":
            action.error(f"{each.metavar} is empty; is a variable unset?")
    return args


def _operands(parsers: Iterable[argparse.ArgumentParser], words: Sequence[str]) -> Iterator[int]:
    """Where the words stand that are no options, and no values of options."""
    flags = {flag: each for parser in parsers for flag, each in parser._option_string_actions.items()}
    value = False
    for at, word in enumerate(words):
        if value or word.startswith("-"):
            value = not value and word in flags and flags[word].nargs != 0
        else:
            yield at


def _owners(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """Which actions have the first unknown option."""
    option = unknown[0].partition("=")[0]
    names = [name for name, each in actions_of(parser).items() if option in each._option_string_actions]
    return f"; {option} goes with {parser.prog} {', '.join(names)}" if names else ""


def usage_advice(action: argparse.ArgumentParser, message: str) -> str:
    """What an action's message ends with: about a missing argument, and the usage."""
    action.color = False  # type: ignore[attr-defined]  # Python 3.14 would colour it
    missing = message.partition("are required: ")[2].split(", ")
    told = [
        f"{each.metavar}: {each.help}"
        for each in action._get_positional_actions()
        if each.metavar in missing and each.help
    ]
    usage = " ".join(action.format_usage().removeprefix("usage: ").split()).replace("[-h] ", "")
    return "; ".join((*told, f"use {usage}"))
