"""Diagnostics about wrapped entries: variables that act on the runner, and entries that only look wrapped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from shlex import join

from runner.contracts.mcp.hosts.entries import servers_of
from runner.contracts.mcp.hosts.find import host_of, place_of
from runner.contracts.mcp.hosts.wrapping import split_wrapped
from runner.contracts.mcp.wrap.configuration import Configuration
from runner.contracts.mcp.wrap.program import runner_path
from runner.contracts.mcp.wrap.steps import Step, wrap_step
from sandbox.document.diagnostic import Diagnostic, quoted
from sandbox.document.read import Document

GROWN = "wrapped_without_variable"
BY_HAND = "runner_by_hand"
OTHERWISE = "wrapped_otherwise"
UNSAFE = "wrapped_unsafely"


def warnings(document: Document) -> tuple[Diagnostic, ...]:
    """Diagnostics for entries that look wrapped or start the runner, and differ from what `wrap` writes. It
    is an error if the configuration can act on the runner or bypass it."""
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
    if step.unsafe:
        looks = "looks wrapped" if step.does == "rewrap" else "has the runner in it"
        message = f"{quoted(server.name)} {looks}, but {'; '.join(step.unsafe)}"
        hint = f"write it anew: {join(wrap)}"
        if step.does != "rewrap":
            hint = (
                f"it {step.reason}" if split_wrapped(server.argv) else "wrap the command itself: runner wrap"
            )
        keys = server.command_keys
        if step.acting and server.env_keys is not None and step.acting[0] != "envFile":
            keys = (*server.env_keys, step.acting[0])
        yield document.diagnostic(keys, UNSAFE, message, hint, "error")
    if step.added:
        names = ", ".join(map(quoted, step.added))
        message = f"{quoted(server.name)} was wrapped before its host passed on {names}: it does not get them"
        yield document.diagnostic(server.keys, GROWN, message, f"add what is new: {join(wrap)}", "warning")
    if step.otherwise:
        reasons = "; ".join(step.otherwise)
        message = f"{quoted(server.name)} is wrapped, but not as runner wrap does it: {reasons}"
        hint = f"if you did not write that, write it anew: {join((*wrap, '--undo'))}, then {join(wrap)}"
        yield document.diagnostic(server.command_keys, OTHERWISE, message, hint, "warning")
    elif step.by_hand:
        message = f"{quoted(server.name)} {step.by_hand}"
        yield document.diagnostic(server.command_keys, BY_HAND, message, "", "warning")
