"""Where a server of a configuration belongs: its folder, and its project."""

from __future__ import annotations

import os

from runner.contracts.mcp.hosts.expand import expand_home, with_folders
from runner.contracts.mcp.hosts.find import place_of
from runner.contracts.mcp.hosts.host import Host, HostServer
from sandbox.speed.value import NamedTuple

OPERATORS_FILE = "claude_desktop_config.json"  # always among a client's own settings, never in a project


class Site(NamedTuple):
    """The folder and project of a server."""

    folder: str  # the base of relative paths, and the working directory if the entry names none
    project: str  # the project that it belongs to; empty: it is a user's own
    within: str  # a folder that it works on has to be below this one; empty: anywhere
    own: bool = False  # the file is the user's own and did not come with a project


def site_of(path: str, server: HostServer, host: Host | None, home: str) -> Site:
    """Where a server belongs. Most of these files can come with a project. Then the project's author wrote
    the file, and must not choose a folder outside the project."""
    folder, name = os.path.split(path)
    place = place_of(path, home)
    own = name == OPERATORS_FILE or (place is not None and place.own)
    if server.scope.startswith("/"):
        return Site(server.scope, server.scope, "" if own else folder, own)
    if place is not None and place.project:
        return Site(place.project, place.project, place.project)
    if own and home and host is not None and host.rules == "vscode":
        folder = home
    return Site(folder, "", "" if own else folder, own)


def directory_of(server: HostServer, site: Site, rules: str, home: str) -> str:
    """The working directory of a server by its configuration. Placeholders that are not folders stay."""
    cwd = expand_home(with_folders(server.cwd, rules, site.project, home), home)
    # normpath keeps two slashes at the beginning.
    return "/" + os.path.normpath(os.path.join(site.folder, cwd)).lstrip("/") if cwd else site.folder
