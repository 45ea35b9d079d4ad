"""Whose variables and folder count, and that nobody asks for the process's own where a client's count."""

from __future__ import annotations

import ast
import contextvars
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from runner.serve.token_command import run_token_command
from sandbox.surroundings import ClientSurroundings, enter, variables, working_folder
from tests.conftest import ROOT

_OWN = {"environ", "environb", "getenv", "getcwd", "getcwdb"}
# Modules that may ask for this process's own, because no client is served where they run.
_COMMANDS = ("cli/", "fleet/", "conformance/", "oci/", "contracts/mcp/wrap/", "doctor/", "speed/", "learn/")
_PROCESSES = {  # that run nothing but one launch, in the surroundings of its order
    *("runner/launch/start.py", "runner/launch/acquire.py", "runner/launch/remote/monitor.py"),
    *("runner/launch/stored/entry.py", "sandbox/cell/agent.py", "sandbox/cell/broker.py"),
    *("sandbox/gate/confine.py", "runner/launch/kept_answers.py"),
}
_PLACES = {  # which are the same for all clients of a hub: runner/gateway/via.py
    *("runner/manifest/unpack.py", "sandbox/cache.py", "runner/gateway/hub.py", "runner/gateway/via.py"),
    "runner/launch/remote/forkserver.py",  # and a locale
}
_RELATIVE = {"sandbox/look.py", "sandbox/paths/walk.py"}  # paths, which are absolute where a client is served


def _asks(path: Path) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in _OWN
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        for node in ast.walk(ast.parse(path.read_text()))
    )


def _modules() -> Iterator[str]:
    for path in sorted((*ROOT.glob("runner/**/*.py"), *ROOT.glob("sandbox/**/*.py"))):
        name = path.relative_to(ROOT).as_posix()
        is_command = path.name.startswith("verb_") or any(f"/{each}" in name for each in _COMMANDS)
        if not is_command and "/example/" not in name and _asks(path):
            yield name


def test_no_module_that_serves_a_client_asks_for_the_process() -> None:
    known = _PROCESSES | _PLACES | _RELATIVE | {"sandbox/surroundings.py"}
    assert set(_modules()) == known


@pytest.mark.trio
async def test_a_command_of_a_client_has_what_the_client_has(tmp_path: Path) -> None:
    told = {}

    async def serve() -> None:
        enter(ClientSurroundings({"NAME": "one", "PATH": "/usr/bin:/bin"}, str(tmp_path)))
        told["client"] = await run_token_command(("sh", "-c", "echo $NAME-$HOME; pwd"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
    assert told["client"] == b"one-\n" + os.fsencode(tmp_path)


@pytest.mark.trio
async def test_what_counts_is_the_clients_also_in_threads_and_tasks() -> None:
    found: dict[str, tuple[str | None, str]] = {}

    async def serve(name: str, place: str) -> None:
        enter(ClientSurroundings({"NAME": name}, place))
        await trio.lowlevel.checkpoint()  # the other one has entered too
        async with trio.open_nursery() as nursery:
            nursery.start_soon(look, name)

    async def look(name: str) -> None:
        found[name] = await trio.to_thread.run_sync(lambda: (variables().get("NAME"), working_folder()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, "one", "/one")
        nursery.start_soon(serve, "two", "/two")
    assert found == {"one": ("one", "/one"), "two": ("two", "/two")}
    assert (variables(), working_folder()) == (os.environ, os.getcwd())
    assert contextvars.Context().run(variables) is os.environ
