"""A host program, where it keeps its configuration, and how it writes a server there."""

from __future__ import annotations

from typing import Literal

from sandbox.spec import KeyPath
from sandbox.speed.value import NamedTuple

# How a file is written. "jsonc" is JSON with comments and trailing commas.
Syntax = Literal["json", "jsonc", "toml", "yaml"]
# How an entry names its program. "plain": command and args. "argv": command is the whole list. "nested":
# command is an object with path, args and env. "cmd": cmd and args, with the variables under envs.
Shape = Literal["plain", "argv", "nested", "cmd"]
# The host whose rules for placeholders apply (expand.py); empty: nothing is filled in.
Rules = Literal["", "claude", "vscode", "cursor", "windsurf", "roo", "gemini", "opencode", "continue"]


class Host(NamedTuple):
    name: str  # as people call it: "Cursor"
    syntax: Syntax
    # The keys that lead to its servers, the first for a user's own; "*" stands for any key.
    servers: tuple[KeyPath, ...]
    files: tuple[str, ...] = ()  # of a user; ~ is the home, $NAME a variable, * any name
    project_files: tuple[str, ...] = ()  # of a project, below its folder; * stands for any name
    system_files: tuple[str, ...] = ()
    shape: Shape = "plain"  # "nested": the host takes "plain" as well
    named_list: bool = False  # its servers are a list whose items have a name
    rules: Rules = ""
    comments: bool = False  # it takes comments and trailing commas in its JSON
    live: bool = False  # the host writes the file while it runs
    sandbox_switch: str = ""  # a key of an entry by which the host has a sandbox of its own
    keys: tuple[str, ...] = ()  # of an entry, that only concern the host
    # Where it keeps what the server NAME writes to stderr, as people find it. Empty: that is not known.
    log: str = ""


class HostServer(NamedTuple):
    """One server of a configuration of any host, as written: placeholders are not filled in."""

    name: str
    keys: KeyPath  # of its entry
    shape: Shape  # of this entry: never "nested" where it is written plainly
    command_keys: KeyPath  # of its program; with the shape "argv", of the list
    args_keys: KeyPath | None  # of its arguments; None: there are none written
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    env_keys: KeyPath | None = None  # of the table of its variables
    passed: tuple[str, ...] = ()  # names of variables that the host passes on
    env_file: str = ""
    cwd: str = ""
    disabled: bool = False
    remote: bool = False  # reached over the network: there is no program
    # Why there is nothing to host although nothing is wrong, as the second half of a sentence. Remote servers
    # have it too.
    skipped: str = ""
    fault: str = ""  # why the entry cannot be read, as the second half of a sentence
    scope: str = ""  # the project whose servers these are, in a file that holds those of several

    @property
    def label(self) -> str:
        """The value for --server, unique among all projects of the file."""
        return f"{self.scope}:{self.name}" if self.scope else self.name
