"""`runner wrap --find`: the configurations on this machine, their servers, and which are wrapped."""

from __future__ import annotations

import os
from typing import Any

from runner.contracts.mcp.hosts.find import known_files
from runner.contracts.mcp.hosts.wrapping import split_wrapped
from runner.contracts.mcp.wrap.config_file import FileRefused, open_config
from runner.contracts.mcp.wrap.configuration import Configuration, configuration
from runner.contracts.mcp.wrap.program import runner_path
from runner.contracts.mcp.wrap.steps import wrap_step
from sandbox.document.diagnostic import DocumentError


def survey(file: str | None) -> list[dict[str, Any]]:
    """All files of known hosts, or the one that is named."""
    return [_survey_file(path, host) for path, host in _files(file)]


def _files(file: str | None) -> list[tuple[str, str]]:
    if file is not None:
        return [(file, "")]
    home = os.path.expanduser("~")
    try:
        here = os.getcwd()
    except OSError:
        here = home
    return [(each.path, each.host.name) for each in known_files(os.environ, home, here)]


def _survey_file(path: str, host: str) -> dict[str, Any]:
    told: dict[str, Any] = {"file": path, "host": host, "servers": [], "fault": ""}
    home = os.path.expanduser("~")
    try:
        with open_config(path) as file:
            raw, _ = file.read()
            config = configuration(file.path, raw, home, dict(os.environ), file.given)
    except FileRefused as refused:
        return {**told, "fault": str(refused)}
    except DocumentError as error:
        return {**told, "fault": error.diagnostics[0].text()}
    return {**told, "host": config.host_name, "servers": _servers(config)}


def _servers(config: Configuration) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    program = runner_path()
    for server in config.servers:
        step = wrap_step(config, server, program, as_fetched=True)
        wrapped = split_wrapped(server.argv) is not None
        # An entry that starts another program only looks wrapped, and has no cage.
        state = "wrapped" if wrapped and step.is_ours else "left" if step.does == "leave" else "not wrapped"
        found.append(
            {
                "name": server.label,
                "state": state,
                "reason": "; ".join((*step.unsafe, *step.otherwise)) if wrapped else step.reason,
                "disabled": server.disabled,
                "variables_acting": list(step.acting),
                "fetches": [spec for each in step.fetches for spec in each.packages],
            }
        )
    return found
