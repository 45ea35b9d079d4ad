"""The plugin that an approval is for: of a manifest, or the command that a host starts through the runner."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from runner.cli import verb_parser
from runner.cli.approving.items import item_lines, items_of
from runner.cli.shared.command import command_of, wrapped_record
from runner.contracts.configurations import PLUGIN_PREFIX
from runner.contracts.registry import find_contract
from runner.launch.approve import allow_command
from runner.launch.command import command_approval
from runner.launch.read import load
from runner.launch.stages import Invocation, Loaded, Stopwatch
from sandbox.paths.homes import homes


class AllowSubject(NamedTuple):
    """The plugin that the approval is for."""

    loaded: Loaded
    entry: Loaded | None = None  # if a host starts it with `runner run`: the entry as it was read
    folder_unknown: bool = False  # the host's working directory is not known; the current one is assumed
    project: str = ""  # the current folder, if the host fills in the project that is open


def unwrap_subject(loaded: Loaded) -> AllowSubject:
    """The subject of an approval. For a plugin that a host starts with `runner run`, that is the command
    behind it."""
    hosts = find_contract(loaded.plugin.contract).configurations
    found = None if hosts is None else hosts.wrapped(loaded.plugin, os.environ)
    if found is None or loaded.invocation.command is not None:
        return AllowSubject(loaded)
    words = _parsed(found.options)
    words.arguments = list(found.argv)
    words.words = [*found.options, "--", *found.argv]
    file, scope, outdated = wrapped_record(words.wrapped)
    again = "runner wrap writes it anew"
    if os.path.realpath(file) != os.path.realpath(loaded.plugin.manifest):
        # A cloned project may claim another configuration: the approval would be for that one.
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
    template = loaded.plugin.template
    by_folder = template is not None and template.decided_by == "folder"
    return AllowSubject(subject, loaded, unknown, os.getcwd() if by_folder else "")


def _parsed(options: Sequence[str]) -> argparse.Namespace:
    """Parse the options of an entry. Raises ValueError in place of printing help or exiting."""

    def refuse(told: str) -> NoReturn:
        raise ValueError(
            f"the options of runner run in this entry cannot be used: {told or 'they ask for help'}"
        )

    return verb_parser("run", refuse=refuse).parse_args(list(options))


def own_words(subject: AllowSubject) -> tuple[str, ...]:
    """What the options of the command line grant already, one line each."""
    command = subject.loaded.invocation.command
    if command is None:
        return ()
    return tuple(item_lines(items_of(command_approval(command), homes(os.environ))))


def command_for(subject: AllowSubject) -> str:
    """The command that allows what the plugin asks for."""
    return allow_command(subject.entry or subject.loaded)
