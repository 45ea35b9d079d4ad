"""Plugins written by others: published MCP servers, and plugins on published SDKs.

scripts/setup installs them: packages from PyPI beside the tests' own tools, packages from npm in .venv/peers.
A plugin runs as another user, who may not be able to enter the checkout. So both are copied once per run to a
folder that every user can read, which takes less than a second each, byte code included.

Tests below tests/runner take the fixture `peers`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.conftest import NODE_PEERS, ROOT, SYSTEM_PATH, TEMP_PREFIX

PLUGINS = ROOT / "tests/plugins"

# Servers: the name that tests use -> arguments of the interpreter.
PYTHON_SERVERS: Mapping[str, tuple[str, ...]] = {
    "time": ("-m", "mcp_server_time", "--local-timezone=Europe/Paris"),
    "sdk": ("server.py",),  # ours: tests/plugins/mcp_sdk
}
NODE_SERVERS = ("everything", "filesystem", "memory")

# One parameter per server. Those from npm are skipped if they are not installed.
EVERY_SERVER = (
    *PYTHON_SERVERS,
    *(pytest.param(name, marks=pytest.mark.needs("npm")) for name in NODE_SERVERS),
)


class Peers:
    """Copies of the peers, and manifests that start them."""

    def __init__(self, home: Path) -> None:
        self._home = home

    @cached_property
    def python(self) -> Path:
        """The interpreter of a virtual environment that holds the Python peers, and nothing else."""
        environment = self._home / "python"
        subprocess.run(
            [_system_python(), "-m", "venv", "--without-pip", str(environment)],
            check=True,
            env={"PATH": SYSTEM_PATH},
        )
        (site,) = environment.glob("lib/python3*/site-packages")
        for distribution in _closure("mcp", "mcp-server-time"):
            _copy_distribution(distribution, site)
        _open(environment)
        return environment / "bin/python"

    @cached_property
    def node_modules(self) -> Path:
        """For tests that are marked `needs("npm")`."""
        copy = self._home / "node/node_modules"
        shutil.copytree(NODE_PEERS, copy, symlinks=True)
        _open(self._home / "node")
        return copy

    def server(self, name: str, folder: Path, *, state: str | None = None) -> dict[str, Any]:
        """The entry of an MCP server in `mcpServers`, for a configuration in `folder`.

        Servers that store files store them in `state`, which must also be the runner's --state-dir. Without
        `state` they use their private /tmp.
        """
        if name in PYTHON_SERVERS:
            if name == "sdk":
                shutil.copy(PLUGINS / "mcp_sdk/server.py", folder)
                (folder / "server.py").chmod(0o644)
            return {"command": str(self.python), "args": list(PYTHON_SERVERS[name])}
        script = self.node_modules / f"@modelcontextprotocol/server-{name}/dist/index.js"
        entry: dict[str, Any] = {"command": "node", "args": [str(script)]}
        if name == "filesystem":
            entry["args"].append(state or "/tmp")
        elif name == "memory":
            entry["env"] = {"MEMORY_FILE_PATH": f"{state or '/tmp'}/memory.jsonl"}
        if state is not None:
            entry["x-sandbox"] = {"write": ["${state_dir}"]}
        return entry

    def mcp(self, folder: Path, *names: str, state: str | None = None) -> Path:
        """Write an mcp.json with these servers to `folder`. --server chooses one."""
        servers = {name: self.server(name, folder, state=state) for name in names}
        path = folder / "mcp.json"
        path.write_text(json.dumps({"mcpServers": servers}))
        path.chmod(0o644)
        return path

    def nexo(self, folder: Path) -> Path:
        """Write the plugin on the nexoai SDK to `folder` as a bundle, with its dependencies."""
        shutil.copytree(PLUGINS / "nexo_sdk", folder, dirs_exist_ok=True)
        for distribution in _closure("nexoai"):
            _copy_distribution(distribution, folder / "vendor")
        _open(folder)
        return folder / "nexo-plugin.toml"


@pytest.fixture(scope="session")
def peers() -> Iterator[Peers]:
    home = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir="/tmp"))
    home.chmod(0o755)
    try:
        yield Peers(home)
    finally:
        shutil.rmtree(home)


def _system_python() -> str:
    """An interpreter below /usr with our own version: compiled packages work with no other."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (os.path.realpath(sys.executable), f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        if path.startswith("/usr/") and os.access(path, os.X_OK):
            return path
    pytest.skip(f"needs a {version} below /usr, where plugins can see it: there is only {sys.executable}")


def _closure(*names: str) -> list[importlib.metadata.Distribution]:
    """The distributions of these names and all their dependencies."""
    found: dict[tuple[str, str], importlib.metadata.Distribution] = {}
    todo = [(name, "") for name in names]  # a name, and an extra of it
    while todo:
        name, extra = todo.pop()
        if (name, extra) in found:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            pytest.fail(f"{name} is not installed: run scripts/setup test")
        found[name, extra] = distribution
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                todo.extend((requirement.name, wanted) for wanted in ("", *requirement.extras))
    return list({each.name: each for each in found.values()}.values())


def _copy_distribution(distribution: importlib.metadata.Distribution, site: Path) -> None:
    for file in distribution.files or ():
        source = Path(str(distribution.locate_file(file)))
        if ".." in file.parts or not source.is_file():
            continue  # a script in bin/, which names another interpreter
        target = site / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)  # keeps the mtime, or the byte code would be outdated


def _open(tree: Path) -> None:
    """Make all files world-readable, whatever the umask."""
    for path in (tree, *tree.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o444))
