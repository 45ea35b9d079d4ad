"""nexo plugins: a TOML manifest, JSON-RPC lines on stdio."""

from __future__ import annotations

from collections.abc import Mapping

from runner.plugin import Switches
from sandbox.document.read import Document, Format

NAME = "nexo"
FORMAT: Format = "toml"
FILE_NAMES = ("plugin.toml", "nexo-plugin.toml")
SIGN = "a [plugin] table"
IN_SUBDIRECTORY = False
OPERATORS_OWN_COMMAND = False


def recognises(document: Document) -> bool:
    data = document.data
    # The second is what came before [plugin]: not hosted, but whoever has one is told what to do.
    return isinstance(data.get("plugin"), dict) or (
        data.get("manifest_version") == 1 and isinstance(data.get("transport"), dict)
    )


# The values its reference host takes for yes; anything else is no.
_YES = ("1", "true", "TRUE", "yes", "YES")
_REQUIRE = "NEXO_PLUGIN_SANDBOX_REQUIRE"
_HOST_NETWORK = "NEXO_PLUGIN_SANDBOX_HOST_NET_ALLOW"


def switches(environ: Mapping[str, str]) -> Switches:
    return Switches(
        sandbox_required_by=_REQUIRE if environ.get(_REQUIRE) in _YES else "",
        host_network_by=_HOST_NETWORK if environ.get(_HOST_NETWORK) in _YES else "",
    )
