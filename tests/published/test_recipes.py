"""The recipes of docs/mcp.md: each is executed with the published server, as an ordinary user."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio

from runner.contracts.mcp.manifest import XSandboxTable
from tests.conftest import ROOT, Caller
from tests.published.places import Desk, make_desk
from tests.published.servers import SERVERS
from tests.published.use import use_all, wrap

PAGE = (ROOT / "docs/mcp.md").read_text()
RECIPE = re.compile(r"^### ([\w-]+)\n.*?^```json\n(.*?)^```\n\n```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONFIGURATION = ".cursor/mcp.json"


class Recipe(NamedTuple):
    name: str
    entry: str
    allow: str


RECIPES = [Recipe(*found) for found in RECIPE.findall(PAGE)]
BY_NAME = {server.name: server for server in SERVERS}


def test_ten_well_known_servers_have_a_recipe() -> None:
    assert len(RECIPES) >= 10 and PAGE.count("\n### ") == len(RECIPES)
    for recipe in RECIPES:
        assert BY_NAME[recipe.name].package in PAGE
        assert list(json.loads(recipe.entry)) == [recipe.name]


def test_every_key_of_x_sandbox_is_on_the_page() -> None:
    _, _, section = PAGE.partition("## What a server can ask for")
    rows = re.findall(r"^\| `(\w+)` \|", section.partition("\n## ")[0], re.MULTILINE)
    assert rows == list(XSandboxTable.model_fields)


def _entry(recipe: Recipe, desk: Desk) -> dict[str, Any]:
    """With the paths of this test. The program has to be the one that the package installs."""
    text = recipe.entry.replace("/home/ada/work", str(desk.work)).replace("/home/ada", str(desk.caller.home))
    entry: dict[str, Any] = json.loads(text)[recipe.name]
    server = BY_NAME[recipe.name]
    assert Path(entry["command"]).name == server.program
    return {**entry, "command": desk.program(server)}


@pytest.mark.needs("registry", "node", "user", "root")
@pytest.mark.bound(1200)
@pytest.mark.broad
def test_the_recipes_work(
    account_user: Caller, programs: Path, plugin_dir: Path, tmp_path: Path, nothing_left: None
) -> None:
    desk = make_desk(account_user, programs, plugin_dir)
    file = account_user.home / CONFIGURATION
    file.parent.mkdir()
    file.write_text(json.dumps({"mcpServers": {each.name: _entry(each, desk) for each in RECIPES}}))
    account_user.give(file.parent)
    wrap(desk, file)
    # A function named like the command, so that the lines are those of the page.
    words = " ".join(f"'{word}'" for word in account_user.command()[len(account_user.prefix) :])
    script = f'set -e\nrunner() {{ {words} "$@" --yes; }}\n' + "".join(each.allow for each in RECIPES)
    done = subprocess.run(
        [*account_user.prefix, "/bin/bash", "-c", script],
        cwd=account_user.home,
        env=dict(account_user.environ),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    servers = [BY_NAME[each.name] for each in RECIPES]
    tried = trio.run(use_all, desk, servers, dict.fromkeys(BY_NAME, file), tmp_path)
    assert [str(each) for each in tried if each.fault] == []
    assert len(tried) == len(RECIPES)
