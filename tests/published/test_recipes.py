"""The recipes of docs/mcp.md: each is executed with the published server, as an ordinary user."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio

from runner.contracts.mcp.tables import XSandboxTable
from tests.conftest import ROOT, Caller
from tests.internet import Internet
from tests.published.places import Desk, make_desk
from tests.published.servers import SERVERS
from tests.published.use import use_all, wrap

PAGE = (ROOT / "docs/mcp.md").read_text()
RECIPE = re.compile(r"^### ([\w-]+)\n.*?^```json\n(.*?)^```\n\n```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONFIGURATION = ".cursor/mcp.json"


class Recipe(NamedTuple):
    name: str
    entry: str
    commands: str

    @property
    def install(self) -> str:
        return "".join(line for line in self.commands.splitlines(True) if not line.startswith("runner "))

    @property
    def allow(self) -> str:
        return self.commands.removeprefix(self.install)


RECIPES = [Recipe(*found) for found in RECIPE.findall(PAGE)]
BY_NAME = {server.name: server for server in SERVERS}


def test_ten_well_known_servers_have_a_recipe() -> None:
    assert len(RECIPES) >= 10 and PAGE.count("\n### ") == len(RECIPES)
    for recipe in RECIPES:
        assert BY_NAME[recipe.name].package in PAGE
        assert list(json.loads(recipe.entry)) == [recipe.name]


def test_every_key_of_x_sandbox_is_on_the_page() -> None:
    _, _, section = PAGE.partition("## What a server can ask for")
    rows = re.findall(r"^\| (`[^|]+`) \|", section.partition("\n## ")[0], re.MULTILINE)
    keys = [key for row in rows for key in re.findall(r"`([^`]+)`", row)]
    assert keys == [field.alias or name for name, field in XSandboxTable.model_fields.items()]


def _entry(desk: Desk, recipe: Recipe) -> dict[str, Any]:
    """With the home of this test, where the recipe's own command has installed the server, and with trust in
    the services of the test."""
    text = recipe.entry.replace("/home/ada", str(desk.caller.home))
    entry: dict[str, Any] = json.loads(text)[recipe.name]
    assert os.access(entry["command"], os.X_OK), entry
    server = BY_NAME[recipe.name]._replace(allowed=tuple(shlex.split(recipe.allow)))
    return {**entry, "env": {**entry.get("env", {}), **desk.trust(server)}}


def _run(caller: Caller, script: str, environ: Mapping[str, str]) -> None:
    """Run lines of the page, as they are printed there."""
    done = subprocess.run(
        [*caller.prefix, "/bin/bash", "-ec", script],
        cwd=caller.home,
        env=dict(environ),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# Where this machine gets packages from. The page does not say, so a user has it set.
_OF_REGISTRIES = (
    "PIP_",
    "NPM_CONFIG_",
    "NODE_EXTRA_CA",
    "SSL_CERT",
    "REQUESTS_CA",
    "HTTP_PROXY",
    "HTTPS_PROXY",
)


@pytest.mark.needs("registry", "node", "user", "root")
@pytest.mark.bound(1200)
@pytest.mark.broad
def test_the_recipes_work(
    account_user: Caller,
    programs: Path,
    services: Internet,
    plugin_dir: Path,
    tmp_path: Path,
    nothing_left: None,
) -> None:
    desk = make_desk(account_user, programs, plugin_dir, services)
    assert desk.work == account_user.home / "work"
    registries = {
        name: value for name, value in os.environ.items() if name.upper().startswith(_OF_REGISTRIES)
    }
    _run(account_user, "".join(each.install for each in RECIPES), {**registries, **account_user.environ})
    file = account_user.home / CONFIGURATION
    file.parent.mkdir()
    entries = {each.name: _entry(desk, each) for each in RECIPES}
    file.write_text(json.dumps({"mcpServers": entries}))
    account_user.give(file.parent)
    wrap(desk, file)
    # A function named like the command, so that the lines are those of the page.
    words = " ".join(f"'{word}'" for word in account_user.command()[len(account_user.prefix) :])
    trust = f'if [[ "$*" == *" --net "* ]]; then set -- "$@" --read {desk.authority}; fi'
    script = f'runner() {{ {trust}; {words} "$@" --yes; }}\n' + "".join(each.allow for each in RECIPES)
    _run(desk.caller, script, account_user.environ)
    servers = [BY_NAME[each.name] for each in RECIPES]
    tried = trio.run(use_all, desk, servers, dict.fromkeys(BY_NAME, file), tmp_path)
    assert [str(each) for each in tried if each.fault] == []
    assert len(tried) == len(RECIPES) and all(each.server.call for each in tried)
