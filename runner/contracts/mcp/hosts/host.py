"""A host program, where it keeps its configuration, and how it writes a server there."""

from __future__ import annotations

from typing import Literal

from sandbox.spec import KeyPath
from sandbox.value import NamedTuple

# How a file is written. "jsonc" is JSON with comments and trailing commas.
Syntax = Literal["json", "jsonc", "toml", "yaml"]
# How an entry names its program. "plain": command and args. "argv": command is the whole list. "nested":
# command is an object with path, args and env. "cmd": cmd and args, with the variables under envs.
Shape = Literal["plain", "argv", "nested", "cmd"]


class Host(NamedTuple):
    name: str  # as people call it: "Cursor"
    syntax: Syntax
    servers: KeyPath  # the keys that lead to its servers; "*" stands for any key
    files: tuple[str, ...] = ()  # of a user; ~ is the home, $NAME a variable
    project_files: tuple[str, ...] = ()  # of a project, below its folder; * stands for any name
    system_files: tuple[str, ...] = ()
    shape: Shape = "plain"
    named_list: bool = False  # its servers are a list whose items have a name
    variables: str = ""  # which of the rules of expand.py it has; empty: none
    live: bool = False  # the host writes the file while it runs
    sandbox_switch: str = ""  # a key of an entry by which the host has a sandbox of its own


class HostServer(NamedTuple):
    """One server of a configuration, whatever the host."""

    name: str
    keys: KeyPath  # of its entry
    command_keys: KeyPath  # of its program
    args_keys: KeyPath | None  # of its arguments; None: there are none written
    argv: tuple[str, ...]  # as written, before anything is expanded
    env: tuple[tuple[str, str], ...] = ()
    env_keys: KeyPath | None = None
    env_file: str = ""
    cwd: str = ""
    disabled: bool = False
    remote: bool = False  # reached over the network: there is no program
    fault: str = ""  # why the entry cannot be read, as the second half of a sentence
