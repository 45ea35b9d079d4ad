"""What a wrapped command line says about the entry that it came from, held against the configuration.

A file of variables is read by the rules of the configuration that names it: a user's own may name any file.
An entry that came with a project must not pass for one of these.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from runner.contracts.contract import WrappedEntry
from runner.contracts.mcp.hosts.expand import as_host_starts
from runner.contracts.mcp.hosts.find import MOST_BYTES
from runner.contracts.mcp.hosts.wrapping import plugin_env_file, run_name
from runner.contracts.mcp.wrap.steps import configuration
from sandbox.document.diagnostic import DocumentError, printable
from sandbox.document.read import read_bounded


def env_file_folder(wrapped: WrappedEntry, environ: Mapping[str, str]) -> str:
    """See Contract.env_file_folder."""
    home = os.path.expanduser("~")
    try:
        config = configuration(wrapped.manifest, read_bounded(wrapped.manifest, limit=MOST_BYTES), home, {})
    except DocumentError as error:
        raise ValueError(f"--env-file: {error.diagnostics[0].text()}") from None
    folder = config.place.project if config.place is not None else ""
    rules = config.host.rules if config.host is not None else ""
    for server in config.servers:
        if (run_name(server.name), server.scope) == (wrapped.id, wrapped.scope):
            named = plugin_env_file(server)
            if wrapped.env_file == as_host_starts(
                named, rules, folder or os.getcwd(), home, environ, lambda path: ""
            ):
                return folder
    told = f"{printable(wrapped.manifest)} names no such file for {printable(wrapped.id)}"
    raise ValueError(f"--env-file {printable(wrapped.env_file)}: {told}; run runner wrap again")
