"""Whom `runner allow` is about: a plugin, or the command that a host starts with `runner run`."""

from __future__ import annotations

import argparse
import os
from typing import NoReturn

from runner.cli.shared.asked import item_lines, items_of
from runner.cli.shared.command import command_of, wrapped_record
from runner.contracts.registry import find_contract
from runner.launch.command import said_by
from runner.launch.prepare import load
from runner.launch.stages import Invocation, Loaded, Stopwatch
from runner.plugin import PLUGIN_PREFIX
from sandbox.paths.homes import homes
from sandbox.speed.typed import Sequence
from sandbox.speed.value import NamedTuple


class AllowSubject(NamedTuple):
    """Whom the yes is for."""

    loaded: Loaded
    entry: Loaded | None = None  # where a host starts it with `runner run`: the entry as it was read
    folder_unknown: bool = False  # where the host starts it, so it is taken to be here


def unwrapped(loaded: Loaded) -> AllowSubject:
    """A plugin that a host starts with `runner run` is the command behind that: its key is the command's."""
    found = find_contract(loaded.plugin.contract).wrapped(loaded.plugin, os.environ)
    if found is None or loaded.invocation.command is not None:
        return AllowSubject(loaded)
    words = _parsed(found.options)
    words.arguments = list(found.argv)
    words.words = [*found.options, "--", *found.argv]
    file, scope, outdated = wrapped_record(words.wrapped)
    again = "runner wrap writes it anew"
    if os.path.realpath(file) != os.path.realpath(loaded.plugin.manifest):
        # A project that was cloned may claim another configuration: the yes would be for that one.
        raise ValueError(f"this entry was wrapped for another configuration: {file}; {again}")
    if scope != loaded.plugin.scope:
        told = f"this entry was wrapped for another project of the file: {scope or 'none'}"
        raise ValueError(f"{told}; {again}")
    environ = {**os.environ, **{PLUGIN_PREFIX + name: value for name, value in found.env}}
    if outdated:  # they have their own names too
        environ.update(found.env)
    command = command_of(words, directory=found.directory, environ=environ)
    if not command.name:
        raise ValueError("this entry was wrapped without a name; run runner wrap again")
    invocation = Invocation("", policy=loaded.invocation.policy, command=command)
    subject = load(invocation, Stopwatch())
    unknown = not found.directory and bool(subject.plugin.folder)
    return AllowSubject(subject, loaded, unknown)


def _parsed(options: Sequence[str]) -> argparse.Namespace:
    """The options of an entry. They must not make this verb do something else."""
    from runner.cli import verb_parser

    def refuse(told: str) -> NoReturn:
        raise ValueError(
            f"the options of runner run in this entry cannot be used: {told or 'they ask for help'}"
        )

    return verb_parser("run", refuse=refuse).parse_args(list(options))


def own_words(subject: AllowSubject) -> tuple[str, ...]:
    """What the options of the command line give it anyway, a line for each."""
    command = subject.loaded.invocation.command
    if command is None:
        return ()
    return tuple(item_lines(items_of(said_by(command), homes(os.environ))))
