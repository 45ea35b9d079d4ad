"""The tables of mcp.json. Other hosts have other entries: what they have in common is `x-sandbox`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from runner.manifest import sandbox_request
from sandbox.document import model

_PATHS_SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": {
        "anyOf": [
            {"type": "string"},
            {
                "type": "object",
                "properties": {"path": {"type": "string"}, "optional": {"type": "boolean"}},
                "required": ["path"],
                "additionalProperties": False,
            },
        ]
    },
}


class _Table(BaseModel):
    model_config = model.TABLE


def _paths(description: str) -> Any:
    return Field(default=None, description=description, json_schema_extra=_PATHS_SCHEMA)


class XSandboxTable(_Table):
    """What the server asks of the cage."""

    read: Any = _paths(
        'Host paths to read: absolute, ~/… or ${plugin_dir}, which is the folder of this file; {"path": …,'
        ' "optional": true} may be missing.'
    )
    write: Any = _paths("Host paths to write. ${state_dir} is the server's own folder.")
    network: Any = Field(
        default=None,
        description='"none" (default), "host", or a list of "name:port".',
        json_schema_extra={
            "anyOf": [{"enum": ["none", "host"]}, {"type": "array", "items": {"type": "string"}}]
        },
    )
    env: list[str] | None = Field(default=None, description="Names of variables to pass on from the host.")
    limits: Any = Field(default=None, json_schema_extra=sandbox_request.limits_schema())
    seccomp: model.Seccomp | None = Field(default=None, description="System calls: strict, default, compat.")
    hide: list[str] | None = Field(
        default=None,
        description='Variables it uses and does not get: "NAME@HOST". A placeholder stands for the value.',
    )
    ssh_keys: list[str] | None = Field(
        default=None,
        alias="ssh-keys",
        description="Fingerprints of keys of your ssh agent that it logs in with: SHA256:…",
    )
    ssh_hosts: list[str] | None = Field(
        default=None, alias="ssh-hosts", description="Where it logs in with them: git.example.com"
    )
    staged: bool | None = Field(
        default=None, description="Keep what it writes apart, until runner apply takes it."
    )
    image: str | None = Field(
        default=None, description="An image in place of this machine's files: python:3.13, ghcr.io/acme/x:1."
    )
    shared: bool | None = Field(
        default=None,
        description="It keeps nothing for one client: clients of one gateway may share its process.",
    )


class ServerTable(_Table):
    """One server."""

    command: str | None = Field(
        default=None, description="Program: on PATH, absolute, or relative with a slash."
    )
    args: list[str] | None = Field(
        default=None,
        description="Arguments. ${state_dir} is the server's own folder, ${plugin_dir} this file's.",
    )
    env: dict[str, str] | None = Field(
        default=None, description="Variables to set. ${state_dir} and ${plugin_dir} are filled in."
    )
    cwd: str | None = Field(
        default=None, description="Working directory. The launch is refused where it is not shown."
    )
    type: Literal["stdio", "http", "sse", "streamable-http", "streamableHttp", "ws"] | None = Field(
        default=None, description="Only stdio can be hosted."
    )
    url: str | None = Field(default=None, description="Servers with a URL cannot be hosted.")
    x_sandbox: XSandboxTable | None = Field(default=None, alias="x-sandbox")
    # Keys of some clients, which the runner does not use.
    description: Any = None
    disabled: Any = None
    timeout: Any = None
    autoApprove: Any = None  # noqa: N815 (the clients' spelling)
    alwaysAllow: Any = None  # noqa: N815
    headers: Any = None


class Manifest(BaseModel):
    """mcp.json"""

    model_config = ConfigDict(strict=True, defer_build=True)
    mcpServers: dict[str, ServerTable] = Field(description="Servers by name.")  # noqa: N815
