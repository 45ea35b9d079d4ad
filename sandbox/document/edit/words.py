"""Encode a string in each syntax."""

from __future__ import annotations

import json
import re

from sandbox.document.edit.span import EditSyntax
from sandbox.document.positions import Fault

# Strings that need no quotes in any version of YAML, between brackets or outside of them.
_YAML_PLAIN = re.compile(r"(?:--?)?[A-Za-z_/][A-Za-z0-9_./@+=-]*")
# Words that are not strings in YAML 1.1 or 1.2.
_YAML_WORDS = frozenset(("true", "false", "yes", "no", "on", "off", "y", "n", "null"))
_PRINTABLE_ASCII = re.compile(r"[\x20-\x7e]*")


def encode_word(word: str, syntax: EditSyntax) -> str:
    """Encode a string in the shortest safe way, on one line."""
    if syntax == "toml":
        if ('"' in word or "\\" in word) and "'" not in word and _PRINTABLE_ASCII.fullmatch(word):
            return f"'{word}'"
        return _escaped(json.dumps(word, ensure_ascii=False))
    if syntax == "yaml":
        if _is_plain(word):
            return word
        if _PRINTABLE_ASCII.fullmatch(word):
            return "'" + word.replace("'", "''") + "'"
        return _escaped(json.dumps(word, ensure_ascii=False))
    return json.dumps(word, ensure_ascii=False)


def _is_plain(word: str) -> bool:
    if not _YAML_PLAIN.fullmatch(word) or word.lower() in _YAML_WORDS:
        return False
    from sandbox.document.yaml import read_word  # PyYAML is slow to import

    try:
        return isinstance(read_word(word, 0), str)
    except Fault:
        return False


def _escaped(literal: str) -> str:
    """Escape what JSON does not escape and TOML or YAML must: DEL, line separators and unprintable
    characters."""
    if literal.isprintable():
        return literal
    return "".join(
        c if c.isprintable() else f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}"
        for c in literal
    )
