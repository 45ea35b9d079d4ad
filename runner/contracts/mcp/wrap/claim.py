"""What a wrapped command line says about the entry that it came from, held against the configuration.

An entry's state, its approvals and the rules for its file of variables are those of the configuration that it
is in. An entry that came with a project must not pass for one of another configuration.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from runner.contracts.contract import EntryFound, WrappedEntry
from runner.contracts.mcp.hosts.find import MOST_BYTES
from runner.contracts.mcp.hosts.wrapping import options_fault, run_name
from runner.contracts.mcp.wrap.configuration import Configuration, configuration, table_names, value_at
from runner.plugin import PLUGIN_PREFIX
from sandbox.document.diagnostic import DocumentError, printable
from sandbox.document.read import read_bounded

# What some host fills in. Which value it had is not known here.
_FILLED = re.compile(r"\$\{\{[^}]*+\}\}|\$\{[^}]*+\}|\{[A-Za-z]++:[^}]*+\}|\$[A-Za-z0-9_]++|^~")


def find_entry(wrapped: WrappedEntry, environ: Mapping[str, str]) -> EntryFound:
    """See Contract.find_entry."""
    if fault := options_fault(wrapped.options):
        allow = "runner allow FILE --server NAME, with --read, --write, --net or --env"
        raise ValueError(f"--wrapped: {fault}; run runner wrap again, and to give it more: {allow}")
    try:
        raw = read_bounded(wrapped.manifest, limit=MOST_BYTES)
        config = configuration(wrapped.manifest, raw, os.path.expanduser("~"), {})
    except DocumentError as error:
        raise ValueError(f"--wrapped: {error.diagnostics[0].text()}") from None
    told = f"{wrapped.manifest} has no entry {wrapped.id} with this command line"
    words = ("run", *wrapped.options, "--", *wrapped.argv)
    for server in config.servers:
        if (run_name(server.name), server.scope) != (wrapped.id, wrapped.scope):
            continue
        if len(server.argv) != len(words) + 1 or not all(map(_may_be, server.argv[1:], words)):
            continue
        names = table_names(config, server)
        told = _wrong_variable(config, server.env_keys or (), names, wrapped, environ)
        if not told:
            is_own = config.place is not None and config.place.own
            folder = config.place.project if config.place is not None else ""
            return EntryFound(folder, None if is_own else frozenset(names if wrapped.outdated else ()))
    raise ValueError(f"--wrapped: {printable(told)}; restart the host, or run runner wrap again")


def _wrong_variable(
    config: Configuration,
    keys: tuple[str | int, ...],
    names: tuple[str, ...],
    wrapped: WrappedEntry,
    environ: Mapping[str, str],
) -> str:
    """Which variable the host has not set as the entry says; empty: none."""
    if not wrapped.outdated:
        for name in environ:
            if name.startswith(PLUGIN_PREFIX) and name not in names:
                return f"{wrapped.manifest} has no variable {name} for {wrapped.id}"
    for name in names:
        written, given = value_at(config.document.data, (*keys, name)), environ.get(name)
        if isinstance(written, str) and given is not None and not _may_be(written, given):
            return f"{wrapped.manifest} has another value of {name} for {wrapped.id}"
    return ""


def _may_be(written: str, given: str) -> bool:
    """Whether a host can have made the second word of the first."""
    first, *parts = _FILLED.split(written)
    if not parts:
        return written == given
    if not given.startswith(first):
        return False
    at = len(first)
    *between, last = parts
    for part in between:
        at = given.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return len(given) - at >= len(last) and given.endswith(last)
