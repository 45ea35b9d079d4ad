"""A host's configuration as it stands in a file."""

from __future__ import annotations

import os
from collections.abc import Sequence

from runner.contracts.mcp.hosts.entries import servers_of
from runner.contracts.mcp.hosts.find import MOST_BYTES, MOST_VALUES, Place, host_by_content, place_of
from runner.contracts.mcp.hosts.host import Host, HostServer
from sandbox.document.read import Document, Format, parse, parse_with_comments
from sandbox.speed.typed import TYPE_CHECKING
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.document.edit.span import EditSyntax

_ENDINGS: tuple[tuple[str, Format], ...] = (
    (".toml", "toml"),
    (".yaml", "yaml"),
    (".yml", "yaml"),
)
_MARK = b"\xef\xbb\xbf"


class Configuration(NamedTuple):
    """A configuration as it stands in a file."""

    path: str  # real and absolute
    raw: bytes
    document: Document
    host: Host | None
    servers: tuple[HostServer, ...]
    place: Place | None = None

    @property
    def host_name(self) -> str:
        return self.host.name if self.host is not None else "an unknown host"

    @property
    def syntax(self) -> EditSyntax:
        return self.document.format


def configuration(
    path: str, raw: bytes, home: str, environ: dict[str, str], given: str = ""
) -> Configuration:
    """Raises DocumentError. `given`: the path by which people know the file, if it is a link."""
    place = place_of(given or path, home, environ)
    body = raw.removeprefix(_MARK)
    ending: Format = next((each for ending, each in _ENDINGS if path.lower().endswith(ending)), "json")
    syntax: Format = ending if place is None else place.host.syntax
    # Some hosts take comments although their documentation does not say so.
    read = parse_with_comments if syntax == "json" else parse
    document = read(path, body, syntax, limit=MOST_BYTES, most_values=MOST_VALUES)
    host = place.host if place is not None else None
    servers = servers_of(document, host)
    if not servers:
        # A copy in another place, or a file that two hosts share.
        other = host_by_content(document)
        host, servers = (other, servers_of(document, other)) if other is not None else (host, servers)
    return Configuration(path, raw, document, host, servers, place)


def table_names(config: Configuration, server: HostServer) -> tuple[str, ...]:
    """The names of its variables as they are written."""
    table = value_at(config.document.data, server.env_keys) if server.env_keys is not None else None
    return tuple(map(str, table)) if isinstance(table, dict) else ()


def image_of(config: Configuration, server: HostServer) -> str:
    """The image that its `x-sandbox` names, as it is written; '' if there is none."""
    found = value_at(config.document.data, (*server.keys, "x-sandbox", "image"))
    return found if isinstance(found, str) else ""


def value_at(data: object, keys: Sequence[str | int]) -> object:
    for key in keys:
        match data:
            case dict():
                data = data.get(key)
            case list() if isinstance(key, int) and key < len(data):
                data = data[key]
            case _:
                return None
    return data


def read_configuration(path: str, raw: bytes, given: str) -> Configuration:
    """The configuration of the calling user."""
    home = os.path.expanduser("~")
    return configuration(path, raw, home if home.startswith("/") else "", dict(os.environ), given)
