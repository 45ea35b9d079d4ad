"""Names of all plugins' tools, prompts and resources as one server shows them.

A tool is PLUGIN__TOOL, and nothing but these two names decides how it is spelled: another plugin changes it
never. The first `__` ends the plugin's part, because that part has none and does not end with `_`. So the
tool b__c of the plugin a is a__b__c, and no tool of a plugin called a__b can be.

A part that hosts would refuse, or that would be read in two ways, gets a short form: what can be kept of it,
`-`, and 12 digits of the SHA-256 of the whole. A part that only looks like a short form gets one too, so that
no plugin can take the name that another one's tool gets.

A resource is runner:PLUGIN/URI, with the URI as its plugin wrote it.
"""

from __future__ import annotations

import hashlib
import re

SEPARATOR = "__"
MOST_NAME = 64  # characters that all known hosts accept
_MOST_PLUGIN = 30
_DIGITS = 12
_SCHEME = "runner:"
_PLAIN = re.compile(r"[A-Za-z0-9_-]+\Z", re.ASCII)
_SHORT = re.compile(r"-[0-9a-f]{12}\Z", re.ASCII)
_OUTSIDE = re.compile(r"[^A-Za-z0-9_-]", re.ASCII)


def plugin_part(plugin: str) -> str:
    ambiguous = SEPARATOR in plugin or plugin.startswith("_") or plugin.endswith("_")
    if _is_plain(plugin, _MOST_PLUGIN) and not ambiguous:
        return plugin
    return _shorten(plugin, _MOST_PLUGIN).replace(SEPARATOR, "--")


def public_name(plugin: str, name: str) -> str:
    """The name of a tool or a prompt."""
    part = plugin_part(plugin)
    room = MOST_NAME - len(part) - len(SEPARATOR)
    return part + SEPARATOR + (name if _is_plain(name, room) else _shorten(name, room))


def public_uri(plugin: str, uri: str) -> str:
    return f"{_SCHEME}{plugin_part(plugin)}/{uri}"


def split_uri(uri: str) -> tuple[str, str] | None:
    """The plugin's part and the plugin's own URI. None: it is no URI of ours."""
    if not uri.startswith(_SCHEME):
        return None
    part, slash, own = uri.removeprefix(_SCHEME).partition("/")
    return (part, own) if slash and part and own else None


def _is_plain(word: str, most: int) -> bool:
    return 0 < len(word) <= most and _PLAIN.match(word) is not None and _SHORT.search(word) is None


def _shorten(word: str, most: int) -> str:
    digits = hashlib.sha256(word.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
    kept = _OUTSIDE.sub("-", word[:most])[: most - _DIGITS - 1].strip("_-")
    return f"{kept}-{digits}" if kept else f"x-{digits}"
