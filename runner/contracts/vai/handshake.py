"""The two hellos. The host says its own at once; either side may be first.

The plugin's identity has to be exactly that of the package: another version is another artifact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner import __version__
from runner.contracts.vai.messages import (
    HELLO,
    IDENTITY_MISMATCH,
    INVALID_FRAME,
    UNEXPECTED_FRAME,
    make_frame,
)
from runner.contracts.vai.terms import PROTOCOL
from runner.plugin import Plugin
from runner.protocol.ambiguity import odd_key
from runner.protocol.dialect import HandshakeFault, Identity, Violation
from sandbox.document.diagnostic import cut, quoted

_MOST_CHARACTERS = 200  # of each text that a plugin reports about itself
_WORDS = frozenset(("package_id", "version"))


def make_hello() -> bytes:
    """The host's hello, as a whole frame."""
    return make_frame(HELLO, role="host", host={"name": "runner", "version": __version__})


def read_hello(frame: Mapping[str, Any], plugin: Plugin) -> Identity:
    """The plugin's identity, from a frame with the right protocol. Raises HandshakeFault."""
    kind = frame.get("type")
    if kind != HELLO:
        message = f"its first frame is {quoted(str(kind))}, and it has to be its hello"
        raise _fault(message, UNEXPECTED_FRAME, "send the hello before anything else")
    if frame.get("role") == "host":
        message = "its hello has the role host: it sends back what it gets, or takes itself for a host"
        raise _fault(message, UNEXPECTED_FRAME, "check that the entrypoint is the plugin")
    if frame.get("role") != "plugin":
        raise _malformed('its role is not "plugin"')
    said = frame.get("plugin")
    if odd := odd_key(said, _WORDS):
        raise HandshakeFault(Violation("malformed_response", f"its hello has {odd}", "ambiguous"))
    if not isinstance(said, dict):
        raise _malformed("plugin is missing or not an object")
    for key in ("package_id", "version"):
        if not isinstance(said.get(key), str):
            raise _malformed(f"plugin.{key} is missing or not a string")
    for key, name, right in (
        ("package_id", "the package", plugin.id),
        ("version", "version", plugin.version),
    ):
        if said[key] != right:
            message = f"it says that it is {name} {quoted(said[key])}, its manifest says {quoted(right)}"
            hint = f"build the program with the {key} of the manifest, or correct {key} in vai-plugin.toml"
            raise _fault(message, IDENTITY_MISMATCH, hint, cut(said["package_id"], _MOST_CHARACTERS))
    return Identity(
        id=plugin.id,
        version=plugin.version,
        protocol=PROTOCOL,
        title=plugin.name,
        tools=dict(plugin.exports).get("tools", ()),
    )


def _malformed(why: str) -> HandshakeFault:
    hint = 'send "role": "plugin" and "plugin": {"package_id": …, "version": …}'
    return _fault(f"its hello breaks the protocol: {why}", INVALID_FRAME, hint)


def _fault(message: str, cause: str, hint: str, plugin_id: str | None = None) -> HandshakeFault:
    return HandshakeFault(Violation("handshake_failed", message, cause, hint, plugin_id=plugin_id))
