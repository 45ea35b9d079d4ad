"""plugin/init: its params, and checks of the answer against the manifest.

The contract's text wants the manifest in the answer. Every plugin in use sends its name and version instead,
so these are read, and further keys are ignored. Another version than the manifest's is only a warning.
"""

from __future__ import annotations

from typing import Any

from runner.contracts.ainb.terms import ABI_VERSION
from runner.plugin import Plugin
from runner.protocol.ambiguity import odd_key
from runner.protocol.dialect import HandshakeFault, Identity, Notice, Setting, Violation
from sandbox.document.diagnostic import quoted
from sandbox.speed.value import NamedTuple

INIT = "plugin/init"

# The host's pid is for plugins that watch whether their host runs. In the cage's pid namespace, pid 1 ends
# together with the host; the host's own pid does not exist there.
_HOST = {"kind": "cli", "pid": 1}
_MOST_CHARACTERS = 200  # of each text that a plugin reports about itself
_WORDS = frozenset(("name", "version"))


class HandshakeAnswer(NamedTuple):
    identity: Identity
    notices: tuple[Notice, ...] = ()


def make_params(setting: Setting) -> dict[str, Any]:
    return {
        "manifest_path": setting.plugin.manifest,
        "granted_capabilities": list(setting.plugin.capabilities),
        "abi_version": ABI_VERSION,
        "config": setting.config,
        "host": dict(_HOST),
    }


def read_handshake_answer(result: Any, plugin: Plugin) -> HandshakeAnswer:
    """Raises HandshakeFault."""
    if not isinstance(result, dict):
        raise _malformed("it is not an object")
    if odd := odd_key(result, _WORDS):
        text = f"its answer to {INIT} has {odd}"
        raise HandshakeFault(Violation("malformed_response", text, "ambiguous"))
    for key in ("name", "version"):
        if not isinstance(result.get(key), str):
            raise _malformed(f"{key} is missing or not a string")
    name, version = result["name"], result["version"][:_MOST_CHARACTERS]
    if name != plugin.id:
        message = f"it says that it is {quoted(name)}, its manifest says {quoted(plugin.id)}"
        hint = "check that the executable beside the manifest belongs to it"
        raise HandshakeFault(
            Violation(
                "handshake_failed", message, "identity_mismatch", hint, plugin_id=name[:_MOST_CHARACTERS]
            )
        )
    identity = Identity(
        id=name,
        version=version,
        protocol=str(ABI_VERSION),
        title=plugin.name,
        tools=dict(plugin.exports).get("tools", ()),
    )
    if result["version"] == plugin.version:
        return HandshakeAnswer(identity)
    versions = {"manifest": plugin.version, "plugin": version}
    return HandshakeAnswer(identity, (Notice("version_differs", versions),))


def _malformed(why: str) -> HandshakeFault:
    message = f"its answer to {INIT} breaks the protocol: {why}"
    return HandshakeFault(Violation("handshake_failed", message, "malformed", "answer with name and version"))
