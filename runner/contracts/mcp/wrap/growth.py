"""What is wrong with wrapped entries: variables that they got since, and what only looks like ours."""

from __future__ import annotations

import os
from collections.abc import Iterator
from shlex import join

from runner.contracts.mcp.hosts.entries import servers_of
from runner.contracts.mcp.hosts.find import host_of, place_of
from runner.contracts.mcp.wrap.program import runner_path
from runner.contracts.mcp.wrap.steps import Configuration, Step, wrap_step
from sandbox.document.diagnostic import Diagnostic, quoted
from sandbox.document.read import Document

RULE = "wrapped_without_variable"
OTHERWISE = "wrapped_otherwise"


def warnings(document: Document) -> tuple[Diagnostic, ...]:
    """For each wrapped entry that has names which its command line does not pass on, or that is written in
    another way than `wrap` writes it."""
    host = host_of(document.path, document)
    servers = servers_of(document, host)
    place = place_of(document.path, os.path.expanduser("~"), os.environ)
    real = os.path.realpath(document.path)
    config = Configuration(real, document.raw, document, host, servers, place)
    program = runner_path()
    steps = [wrap_step(config, server, program) for server in servers]
    return tuple(each for step in steps for each in _warnings(document, step))


def _warnings(document: Document, step: Step) -> Iterator[Diagnostic]:
    server = step.server
    wrap = ("runner", "wrap", document.path, "--server", server.label)
    if step.otherwise:
        reasons = "; ".join(step.otherwise)
        message = f"{quoted(server.name)} is wrapped, but not as runner wrap does it: {reasons}"
        hint = f"if you did not write that, write it anew: {join((*wrap, '--undo'))}, then {join(wrap)}"
        yield document.diagnostic(server.command_keys, OTHERWISE, message, hint, "warning")
    if step.does != "add":
        return
    names = ", ".join(map(quoted, step.added))
    what = f"the variable {names}" if len(step.added) == 1 else f"the variables {names}"
    message = f"{quoted(server.name)} was wrapped without {what}, so the server does not get it"
    message = message if len(step.added) == 1 else message[:-2] + "them"
    hint = f"add what is new: {join(wrap)}"
    keys = server.env_keys if server.env_keys is not None else server.keys
    yield document.diagnostic((*keys, step.added[0]), RULE, message, hint, "warning")
