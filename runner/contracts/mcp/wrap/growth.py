"""What an entry got since it was wrapped: variables that its server does not see."""

from __future__ import annotations

from shlex import join

from runner.contracts.mcp.hosts.entries import servers_of
from runner.contracts.mcp.hosts.find import host_of
from runner.contracts.mcp.wrap.steps import Configuration, wrap_step
from sandbox.document.diagnostic import Diagnostic, quoted
from sandbox.document.read import Document

RULE = "wrapped_without_variable"


def warnings(document: Document) -> tuple[Diagnostic, ...]:
    """One for each wrapped entry that has names which its command line does not pass on."""
    host = host_of(document.path, document)
    servers = servers_of(document, host)
    config = Configuration(document.path, document.raw, document, host, servers)
    found: list[Diagnostic] = []
    for server in servers:
        step = wrap_step(config, server)
        if step.does != "add":
            continue
        names = ", ".join(map(quoted, step.added))
        what = f"the variable {names}" if len(step.added) == 1 else f"the variables {names}"
        message = f"{quoted(server.name)} was wrapped without {what}, so the server does not get it"
        message = message if len(step.added) == 1 else message[:-2] + "them"
        hint = f"add what is new: {join(('runner', 'wrap', document.path, '--server', server.label))}"
        keys = server.env_keys if server.env_keys is not None else server.keys
        place = (*keys, step.added[0])
        found.append(document.diagnostic(place, RULE, message, hint, "warning"))
    return tuple(found)
