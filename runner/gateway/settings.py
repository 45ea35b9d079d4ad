"""The settings of a gateway: what each client sees and may do, and the servers elsewhere.

The file that says so, and its rules: settings_file.py.
"""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

DEFAULT_CLIENT = "default"
CONFIRM_SECONDS = 120.0  # for a person's answer
LIST_SECONDS = 5.0  # the shortest time that a known host gives a server at its start is 10 s


class ClientSettings(NamedTuple):
    """What one client sees. Empty patterns allow nothing."""

    plugins: tuple[str, ...] = ("*",)
    tools: tuple[str, ...] = ("*",)
    rename: Mapping[str, str] = {}  # public name -> the client's own
    calls_per_minute: int = 0  # 0: any number
    policy: str | None = None
    confirm: tuple[str, ...] = ()  # patterns of public names, and the words of confirmations.py
    confirm_seconds: float = CONFIRM_SECONDS
    confirm_by: Literal["client", "operator"] = (
        "client"  # whose person is asked, if the client can ask its own
    )

    def sees_plugin(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.plugins)

    def sees_tool(self, public: str) -> bool:
        return any(fnmatch.fnmatchcase(public, pattern) for pattern in self.tools)

    def shown_as(self, public: str) -> str:
        return self.rename.get(public, public)

    def meant_by(self, shown: str) -> str:
        """The public name behind a client's own. A name that was renamed has no other one."""
        if shown in self.rename:
            return ""
        return next((public for public, own in self.rename.items() if own == shown), shown)


class RemoteSettings(NamedTuple):
    name: str
    url: str
    token_file: str = ""
    token_command: tuple[str, ...] = ()
    # For a sign-in, where the server registers no clients by itself.
    client_id: str = ""
    client_secret_file: str = ""
    issuer: str = ""  # whom that secret is for
    callback_port: int = 0  # 0: any that is free
    file: str = ""  # that these settings are from
    options: tuple[str, ...] = ()  # by which a sign-in is judged by the policy of this gateway

    @property
    def login_command(self) -> str:
        """What signs a person in."""
        return self.login_with("")

    def login_with(self, scope: str) -> str:
        """`scope`: rights that the server wants beside what it asks for first."""
        more = ("--scope", scope) if scope else ()
        words = ("runner", "gateway", "login", self.name, "--settings", self.file or "FILE")
        return shlex.join((*words, *self.options, *more))


class GatewaySettings(NamedTuple):
    clients: Mapping[str, ClientSettings] = {}
    remotes: tuple[RemoteSettings, ...] = ()
    trust_first: bool = True
    webhook: str = ""  # where questions that wait for a person are told
    folders: Mapping[str, str] = {}  # the path that a plugin's name is for
    plugins: Mapping[str, Mapping[str, Any]] = {}  # by name: fields of runner.lifecycle.Spec

    def client(self, name: str) -> ClientSettings:
        return self.clients.get(name) or self.clients.get(DEFAULT_CLIENT) or ClientSettings()
