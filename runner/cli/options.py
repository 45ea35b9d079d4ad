"""The options that several verbs share: what to run, under which policy and limits."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from runner.contracts.registry import contract_options
from runner.launch.stages import Invocation
from sandbox.document.diagnostic import did_you_mean, quoted
from sandbox.policy.grant import Overrides
from sandbox.policy.policy import LIMIT_NAMES
from sandbox.spec import Limits, is_variable_name
from sandbox.value import NamedTuple

if TYPE_CHECKING:
    import argparse


def add_invocation(parser: argparse.ArgumentParser, *, launching: bool) -> None:
    parser.add_argument("manifest", metavar="MANIFEST", help="the plugin's manifest, or the folder it is in")
    add_manifest_choice(parser)
    parser.add_argument(
        "--policy",
        metavar="NAME|FILE",
        help="a policy by name (default, strict, dev) or file; without it $RUNNER_POLICY, then"
        " /etc/runner/policy.toml, then default",
    )
    parser.add_argument(
        "--state-dir",
        metavar="D",
        help="the directory for the plugin's ${state_dir}, if it asks for one; each plugin needs its own",
    )
    parser.add_argument(
        "--env",
        metavar="K=V",
        action="append",
        default=[],
        help="give the plugin a variable; K alone passes on the runner's own value",
    )
    add_config(parser)
    add_limits(parser)
    add_contract_options(parser)
    parser.set_defaults(arguments=[])
    parser.usage = f"{parser.prog} [options] MANIFEST" + (" [-- ARGS]" if launching else "")


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="JSON|@FILE", help="the plugin's configuration, if its contract has one"
    )


def config_of(word: str | None) -> str:
    """--config as JSON text; empty if it was not given. ValueError says what is wrong with it."""
    if word is None:
        return ""
    import json

    from runner.cli.json_option import read_json_option

    return json.dumps(read_json_option("--config", word))


# The limits people reach for have options of their own; --limit knows them all.
_OPTIONS = (
    ("memory", "SIZE", "memory of all its processes, with what they keep in /tmp and /dev/shm"),
    ("pids", "N", "processes and threads"),
    ("cpu", "CORES", "0.5, 2 or 50%%"),
    ("cpu_time", "TIME", "processor time"),
    ("deadline", "TIME", "time from start to end"),
)


def add_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group(
        "limits",
        "The lowest of these, the manifest's and the policy's limits applies.\n"
        "Sizes are written 512K, 256M, 1.5G; times 500ms, 30s, 1h30m.",
    )
    for name, metavar, about in _OPTIONS:
        option = "--" + name.replace("_", "-")
        limits.add_argument(
            option, metavar=metavar, help=about, dest="limits", action="append", default=[], type=_named(name)
        )
    have_one = [name for name, _, _ in _OPTIONS]
    others = ", ".join(name for name in LIMIT_NAMES if name not in have_one)
    limits.add_argument(
        "--limit",
        metavar="NAME=VALUE",
        help=f"any limit by its name, one per option; besides the above: {others}",
        dest="limits",
        action="append",
        default=[],
        type=_LimitOption.parse,
    )


class _LimitOption(NamedTuple):
    """A limit as it stands on the command line. `words` begin the message about it."""

    words: str
    name: str
    value: str | None  # None: there was no "="

    @classmethod
    def parse(cls, word: str) -> _LimitOption:
        name, equals, value = word.partition("=")
        return cls(f"--limit {word}", name, value if equals else None)


def _named(name: str) -> Callable[[str], _LimitOption]:
    return lambda value: _LimitOption(f"--{name.replace('_', '-')} {value}", name, value)


def add_manifest_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--contract", metavar="NAME", help="read the manifest as this contract's, whatever its file name"
    )
    parser.add_argument(
        "--server", metavar="NAME", help="which plugin of a manifest that lists several servers"
    )


def add_contract_options(parser: argparse.ArgumentParser) -> None:
    """The options that contracts bring along for this verb."""
    options = contract_options(parser.prog.rpartition(" ")[2])
    if not options:
        return
    group = parser.add_argument_group(
        "options of contracts", "Each is for plugins of the contracts that have it, and refused for others."
    )
    for option in options.values():
        group.add_argument(
            option.flag,
            metavar=option.metavar,
            help=option.help.replace("%", "%%"),  # argparse would fill it in
            dest=_CONTRACT_DEST + option.name,
        )


# Keeps their values apart from our own options in what argparse returns.
_CONTRACT_DEST = "contract_option_"


def contract_options_of(args: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """The values given for options of contracts, by name. ValueError: one is empty."""
    found = []
    for dest, value in vars(args).items():
        if dest.startswith(_CONTRACT_DEST) and value is not None:
            name = dest.removeprefix(_CONTRACT_DEST)
            if value == "":
                raise ValueError(_empty(name))
            found.append((name, value))
    return tuple(found)


def _empty(name: str) -> str:
    return f"--{name.replace('_', '-')}: its value is empty; is a variable unset?"


def invocation_of(args: argparse.Namespace) -> Invocation:
    """ValueError says what is wrong with the options."""
    for option in ("policy", "state_dir", "contract", "server"):
        if getattr(args, option) == "":
            raise ValueError(_empty(option))
    env: list[tuple[str, str]] = []
    names: list[str] = []
    for word in args.env:
        name, equals, value = word.partition("=")
        if not is_variable_name(name):
            raise ValueError(f"--env {word}: {name!r} is not the name of a variable")
        if equals:
            env.append((name, value))
        elif name in os.environ:
            names.append(name)
        else:
            raise ValueError(
                f"--env {name}: the runner's environment has no such variable; to set it write {name}=VALUE"
            )
    return Invocation(
        manifest=args.manifest,
        contract=args.contract,
        server=args.server,
        policy=args.policy,
        state_dir=args.state_dir,
        args=tuple(args.arguments),
        overrides=Overrides(env=tuple(env), pass_env=tuple(names), limits=_limits(args.limits)),
        options=contract_options_of(args),
        config=config_of(args.config),
    )


def _limits(limits: Sequence[_LimitOption]) -> Limits:
    if not limits:
        return Limits()
    from sandbox.units import parse_limit

    found: dict[str, Any] = {}
    for words, name, value in limits:
        if value is None:
            raise ValueError(f"{words}: write NAME=VALUE, as in memory=256M")
        if name not in LIMIT_NAMES:
            hint = did_you_mean(name, LIMIT_NAMES) or f"there are {', '.join(LIMIT_NAMES)}"
            raise ValueError(f"{words}: no limit is called {quoted(name)}; {hint}")
        if name in found:
            raise ValueError(f"{words}: {name} is given twice")
        try:
            found[name] = parse_limit(name, value)
        except ValueError as error:
            raise ValueError(f"{words}: {error}") from None
    return Limits(**found)
