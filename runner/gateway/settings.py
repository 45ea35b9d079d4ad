"""The settings of a gateway: what each client sees and may do, and the servers elsewhere.

    trust_first = true                      # false: tools of a plugin are shown after `runner allow --diff`

    [clients.default]                       # of every client that has no table of its own
    plugins = ["notes", "git*"]             # which plugins; * and ? are wildcards
    tools = ["notes__*", "git__log"]        # which tools and prompts of them, by their public names
    rename = { notes__search = "find" }     # public name -> the name for this client
    calls_per_minute = 60
    policy = "strict"                       # on stdio; a daemon has one policy for all

    [clients.cursor]                        # runner gateway --client cursor
    [clients."uid:1000"]                    # at a daemon's door: by uid, "token", or "cert:SUBJECT"

    [plugins.notes]                         # on stdio
    folder = "/home/me/plugins/notes"       # whose name that is, if several plugins ask for it
    limits = { call = "30s" }               # as --limit of `runner call`

    [remotes.tracker]                       # a server on streamable HTTP, as one more plugin
    url = "https://mcp.example.com/mcp"
    token_file = "/home/me/.secrets/tracker"    # or token_command = ["pass", "show", "tracker"]

Every unknown key and every value of a wrong type is refused, with its place.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Mapping
from typing import Any

from runner.gateway.names import MOST_NAME, SEPARATOR
from runner.serve.settings_file import limit_fault
from sandbox.document.diagnostic import Diagnostic, DocumentError, did_you_mean, quoted
from sandbox.document.read import Document, parse, read_bounded
from sandbox.policy.load import trust_fault
from sandbox.spec import KeyPath
from sandbox.speed.value import NamedTuple

DEFAULT_CLIENT = "default"
LIST_SECONDS = 5.0  # the shortest time that a known host gives a server at its start is 10 s
_MOST_RATE = 1_000_000
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MOST_NAME}}}\Z", re.ASCII)
_TOKEN_KEYS = ("token", "bearer_token", "headers", "authorization", "api_key")
_TOKEN_HINT = "write it to a file that only you can read, and give token_file, or give token_command"


class ClientSettings(NamedTuple):
    """What one client sees. Empty patterns allow nothing."""

    plugins: tuple[str, ...] = ("*",)
    tools: tuple[str, ...] = ("*",)
    rename: Mapping[str, str] = {}  # public name -> the client's own
    calls_per_minute: int = 0  # 0: any number
    policy: str | None = None

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


class GatewaySettings(NamedTuple):
    clients: Mapping[str, ClientSettings] = {}
    remotes: tuple[RemoteSettings, ...] = ()
    trust_first: bool = True
    folders: Mapping[str, str] = {}  # the path that a plugin's name is for
    limits: Mapping[str, Mapping[str, Any]] = {}  # by the plugin's name

    def client(self, name: str) -> ClientSettings:
        return self.clients.get(name) or self.clients.get(DEFAULT_CLIENT) or ClientSettings()


def read_settings(path: str) -> GatewaySettings:
    """Raises DocumentError with every fault of the file."""
    path = os.path.abspath(path)
    fault = trust_fault(path, "the settings", private_groups=True)
    if fault is not None:
        raise DocumentError(Diagnostic(path, 0, 0, "settings_untrusted", *fault))
    document = parse(path, read_bounded(path), "toml")
    reader = _GatewayReader(document)
    reader.known((), document.data, ("clients", "plugins", "remotes", "trust_first"))
    trust_first = document.data.get("trust_first", True)
    if not isinstance(trust_first, bool):
        reader.fault(("trust_first",), "wrong_type", "trust_first has to be true or false")
    clients = {name: _client(reader, keys, table) for name, keys, table in reader.tables("clients")}
    remotes = tuple(_remote(reader, name, keys, table) for name, keys, table in reader.tables("remotes"))
    plugins = reader.tables("plugins")
    folders = {name: _folder(reader, path, keys, table) for name, keys, table in plugins if "folder" in table}
    limits = {name: _limits(reader, keys, table) for name, keys, table in plugins}
    if reader.faults:
        raise DocumentError(*reader.faults)
    return GatewaySettings(clients, remotes, trust_first is True, folders, limits)


class _GatewayReader:
    def __init__(self, document: Document) -> None:
        self._document = document
        self.faults: list[Diagnostic] = []

    def fault(self, keys: KeyPath, rule: str, message: str, hint: str = "") -> None:
        self.faults.append(self._document.diagnostic(keys, rule, message, hint))

    def known(self, keys: KeyPath, table: Mapping[str, Any], names: tuple[str, ...]) -> None:
        for name in table:
            if name not in names:
                hint = did_you_mean(name, names) or f"there are: {', '.join(names)}"
                self.fault((*keys, name), "unknown_key", f"there is no key {quoted(name)} here", hint)

    def tables(self, name: str) -> list[tuple[str, KeyPath, dict[str, Any]]]:
        """The tables in the table of this name."""
        outer = self._document.data.get(name, {})
        found: list[tuple[str, KeyPath, dict[str, Any]]] = []
        if not isinstance(outer, dict):
            self.fault((name,), "wrong_type", f"{name} has to be a table")
            return []
        for key, value in outer.items():
            if isinstance(value, dict):
                found.append((key, (name, key), value))
            else:
                self.fault((name, key), "wrong_type", f"{name}.{key} has to be a table")
        return found

    def text(self, keys: KeyPath, table: Mapping[str, Any], name: str) -> str:
        value = table.get(name, "")
        if isinstance(value, str) and (value or name not in table):
            return value
        self.fault((*keys, name), "wrong_type", f"{name} has to be a text that is not empty")
        return ""

    def texts(self, keys: KeyPath, table: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
        value = table.get(name)
        if value is None:
            return None
        if isinstance(value, list) and all(isinstance(each, str) and each for each in value):
            return tuple(value)
        self.fault((*keys, name), "wrong_type", f"{name} has to be a list of texts")
        return ()


def _client(reader: _GatewayReader, keys: KeyPath, table: dict[str, Any]) -> ClientSettings:
    reader.known(keys, table, ClientSettings._fields)
    every = ("*",)
    plugins, tools = reader.texts(keys, table, "plugins"), reader.texts(keys, table, "tools")
    rate = table.get("calls_per_minute", 0)
    if type(rate) is not int or not 0 <= rate <= _MOST_RATE or (rate == 0 and "calls_per_minute" in table):
        message = f"calls_per_minute has to be a whole number from 1 to {_MOST_RATE}"
        reader.fault((*keys, "calls_per_minute"), "wrong_type", message)
        rate = 0
    return ClientSettings(
        every if plugins is None else plugins,
        every if tools is None else tools,
        _rename(reader, keys, table),
        rate,
        reader.text(keys, table, "policy") or None,
    )


def _rename(reader: _GatewayReader, keys: KeyPath, table: dict[str, Any]) -> dict[str, str]:
    given, keys = table.get("rename", {}), (*keys, "rename")
    if not isinstance(given, dict):
        reader.fault(keys, "wrong_type", "rename has to be a table of names")
        return {}
    found: dict[str, str] = {}
    for public, own in given.items():
        # A name with two underscores could be that of another plugin's tool.
        if not isinstance(own, str) or not _NAME.match(own) or SEPARATOR in own:
            message = f"the new name of {quoted(public)} cannot be used"
            hint = f"letters, digits, - and _, at most {MOST_NAME}, and no {SEPARATOR}"
            reader.fault((*keys, public), "bad_name", message, hint)
        elif own in found.values():
            reader.fault((*keys, public), "name_taken", f"two tools cannot both be called {quoted(own)}")
        else:
            found[public] = own
    return found


def _folder(reader: _GatewayReader, path: str, keys: KeyPath, table: dict[str, Any]) -> str:
    return os.path.join(os.path.dirname(path), reader.text(keys, table, "folder"))


def _limits(reader: _GatewayReader, keys: KeyPath, table: dict[str, Any]) -> Mapping[str, Any]:
    reader.known(keys, table, ("folder", "limits"))
    given = table.get("limits", {})
    if not isinstance(given, dict):
        reader.fault((*keys, "limits"), "wrong_type", "limits has to be a table")
        return {}
    for name, value in given.items():
        if fault := limit_fault(name, value):
            reader.fault((*keys, "limits", name), "bad_limit", *fault)
    return given


def _remote(reader: _GatewayReader, name: str, keys: KeyPath, table: dict[str, Any]) -> RemoteSettings:
    for key in table:
        if key in _TOKEN_KEYS:
            reader.fault((*keys, key), "literal_token", f"{key}: a token does not belong here", _TOKEN_HINT)
    others = {key: value for key, value in table.items() if key not in _TOKEN_KEYS}
    reader.known(keys, others, ("url", "token_file", "token_command"))
    url = reader.text(keys, table, "url")
    if "url" not in table:
        reader.fault(keys, "missing_key", f"the remote {quoted(name)} has no url")
    elif not url.startswith("https://") or "@" in url.partition("//")[2].partition("/")[0]:
        message = "url has to begin with https:// and must not name a user or a password"
        reader.fault((*keys, "url"), "bad_url", message, _TOKEN_HINT if "@" in url else "")
    command = reader.texts(keys, table, "token_command") or ()
    path = reader.text(keys, table, "token_file")
    if path and command:
        reader.fault((*keys, "token_command"), "two_tokens", "give token_file or token_command, not both")
    if path and not path.startswith("/"):
        reader.fault((*keys, "token_file"), "bad_path", "token_file has to be an absolute path")
    return RemoteSettings(name, url, path, command)
