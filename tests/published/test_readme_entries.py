"""The entries in servers.py are those of the READMEs that the installed packages bring along."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.published.install import HERE
from tests.published.servers import NEEDED, SERVERS, Published

pytestmark = [pytest.mark.needs("registry", "node"), pytest.mark.bound(1200), pytest.mark.broad]


def _readme(programs: Path, server: Published) -> str:
    if server.where == "npm":
        return (programs / "npm/node_modules" / server.package / "README.md").read_text()
    name = re.sub(r"[-.]", "_", server.package)
    [metadata] = (programs / server.where).glob(f"lib/python3*/site-packages/{name}-*.dist-info/METADATA")
    return metadata.read_text()


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.name)
def test_the_entry_is_that_of_the_readme(programs: Path, server: Published) -> None:
    readme = re.sub(r"\s", "", _readme(programs, server))
    words = [json.dumps(word) for word in server.entry.args]
    args = f',"args":[{",".join(words)}]' if words else ""
    assert f'"command":"{server.entry.command}"{args}' in readme
    for name, value in server.entry.env.items():
        assert re.sub(r"\s", "", f'"{name}":"{value}"') in readme


def test_the_versions_are_pinned() -> None:
    npm = json.loads((HERE / "npm/package-lock.json").read_text())["packages"]
    pinned = {name.removeprefix("node_modules/") for name, about in npm.items() if about.get("integrity")}
    for name in ("mcp-1", "mcp-2"):
        lines = (HERE / f"{name}.txt").read_text().splitlines()
        assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
        pinned |= {line.partition("==")[0] for line in lines}
    wanted = {
        server.package if server.where == "npm" else server.package.replace(".", "-") for server in SERVERS
    }
    assert wanted - pinned == set()
    assert len([server for server in SERVERS if server.call is not None]) >= NEEDED
    assert [server.name for server in SERVERS if (server.call is None) != bool(server.lacks)] == []
