"""The options that say what to run and under which policy, shared by exec and explain."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from runner.prepare import Invocation
from sandbox.grants import Overrides
from sandbox.spec import Limits, is_variable_name

if TYPE_CHECKING:
    import argparse


def add_invocation(parser: argparse.ArgumentParser, *, launching: bool) -> None:
    parser.add_argument("manifest", metavar="MANIFEST", help="the plugin's manifest, or the folder it is in")
    add_manifest_choice(parser)
    parser.add_argument(
        "--policy",
        metavar="NAME|FILE",
        help="default, strict, dev or a file; else $RUNNER_POLICY, /etc/runner/policy.toml or default",
    )
    parser.add_argument(
        "--state-dir",
        metavar="D",
        help="where the plugin's ${state_dir} is, if it asks for one: one directory per plugin",
    )
    parser.add_argument(
        "--env",
        metavar="K=V",
        action="append",
        default=[],
        help="give the plugin a variable; K alone passes on the runner's own value",
    )
    parser.add_argument("--deadline", metavar="S", help="end the plugin after this long (30, 30s, 2m)")
    parser.set_defaults(arguments=[])
    if launching:
        parser.usage = "runner exec [options] MANIFEST [-- ARGS]"


def add_manifest_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--contract", metavar="NAME", help="read the manifest as this contract's")
    parser.add_argument("--server", metavar="NAME", help="which server of an MCP configuration")


def invocation_of(args: argparse.Namespace) -> Invocation:
    """ValueError says what is wrong with the words."""
    from sandbox.units import parse_duration

    for option in ("policy", "state_dir", "contract", "server"):
        if getattr(args, option) == "":
            # An unset variable of a script, most likely: taking it for "none" would be taking it lightly.
            raise ValueError(f"--{option.replace('_', '-')}: an empty word names nothing")
    env: list[tuple[str, str]] = []
    names: list[str] = []
    for word in args.env:
        name, equals, value = word.partition("=")
        if not is_variable_name(name):
            raise ValueError(f"--env {word}: {name!r} is no name of a variable")
        if equals:
            env.append((name, value))
        elif name in os.environ:
            names.append(name)
        else:
            raise ValueError(f"--env {name}: there is no such variable here; to set it write {name}=VALUE")
    deadline = None
    if args.deadline is not None:
        try:
            deadline = parse_duration(args.deadline)
        except ValueError as error:
            raise ValueError(f"--deadline {args.deadline}: {error}") from None
        if deadline <= 0:
            raise ValueError(f"--deadline {args.deadline}: must be longer than nothing")
    return Invocation(
        manifest=args.manifest,
        contract=args.contract,
        server=args.server,
        policy=args.policy,
        state_dir=args.state_dir,
        args=tuple(args.arguments),
        overrides=Overrides(env=tuple(env), pass_env=tuple(names), limits=Limits(deadline=deadline)),
    )
