"""What a plugin is, whatever contract it was written for."""

from __future__ import annotations

from typing import Literal

from sandbox.spec import Project, SandboxSpec
from sandbox.value import NamedTuple

ContractName = Literal["nexo", "rune", "mcp"]


class Entrypoint(NamedTuple):
    """How the plugin's own program is started, before any cage is put around it."""

    command: str  # with a slash: relative to `directory`; without: looked up on PATH
    args: tuple[str, ...] = ()
    directory: str = "/"  # absolute: working directory, and what a relative command hangs on
    # Contracts that promise "exactly these variables" get no PATH, HOME, LANG of ours.
    bare_environment: bool = False


class Plugin(NamedTuple):
    id: str
    version: str
    contract: ContractName
    name: str
    description: str
    manifest: str  # absolute path of the file this was read from
    # The plugin's own folder, bound read-only. None when the manifest is not part of the plugin
    # (an MCP configuration lists other people's programs): then only the program's own files are.
    root: str | None
    entrypoint: Entrypoint | None  # None: nothing to start (nexo "in-tree" plugins)
    spec: SandboxSpec
    exports: tuple[tuple[str, tuple[str, ...]], ...] = ()  # kind ("tools", "hooks", …) -> names
    capabilities: tuple[str, ...] = ()
    timeouts: tuple[tuple[str, float], ...] = ()  # phase -> seconds
    project: Project | None = None  # what it is at work on, where that is not its own folder


class Switches(NamedTuple):
    """What the operator says through a contract's own environment variables."""

    sandbox_required_by: str = ""  # the variable that refuses manifests without a sandbox, if it is set
    # The variable that asks for the host's network, if it is set. The policy says whether that counts.
    host_network_by: str = ""
