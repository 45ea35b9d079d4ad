"""Keys: how people write them after --keys, and how notifications carry them.

A key is a character or a name, after any number of modifiers: `j`, `enter`, `ctrl+c`, `alt+shift+f4`. A
terminal reports a capital letter together with shift, and shift+tab as a key of its own. So do we.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any, Final, Literal

from sandbox.document.diagnostic import did_you_mean, quoted
from sandbox.speed.value import NamedTuple

SHIFT: Final = 1
CTRL: Final = 2
ALT: Final = 4
SUPER: Final = 8
MODIFIERS: Final[Mapping[str, int]] = {"shift": SHIFT, "ctrl": CTRL, "alt": ALT, "super": SUPER}
ALL_MODIFIERS: Final = SHIFT | CTRL | ALT | SUPER

# Types of a key's code on the wire that have no field.
NAMES: Final = tuple(
    "enter tab back_tab esc backspace delete up down left right home end page_up page_down".split()
)
MOST_FUNCTION_KEY: Final = 12  # of a keyboard

_SPELLED = (*NAMES, "space", *(f"f{number}" for number in range(1, MOST_FUNCTION_KEY + 1)))

KeyKind = Literal["press", "repeat", "release"]
_KINDS = ("press", "repeat", "release")


class KeysFault(ValueError):
    """Keys that nobody can press: a sentence, with a hint."""


class Key(NamedTuple):
    code: str  # one character, one of NAMES, or "f1" to "f12"
    modifiers: int = 0  # bits
    kind: KeyKind = "press"


def read_keys(text: str) -> tuple[Key, ...]:
    """Keys separated by blanks. Raises KeysFault."""
    return tuple(read_key(word) for word in text.split())


def read_key(word: str) -> Key:
    """Raises KeysFault."""
    *before, last = _split(word)
    modifiers = 0
    for name in before:
        bit = MODIFIERS.get(name.lower())
        if bit is None:
            hint = did_you_mean(name.lower(), MODIFIERS) or f"there are {', '.join(MODIFIERS)}"
            raise KeysFault(f"the key {quoted(word)} has the unknown modifier {quoted(name)}; {hint}")
        if modifiers & bit:
            raise KeysFault(f"the key {quoted(word)} has the modifier {name.lower()} twice")
        modifiers |= bit
    return as_typed(Key(_read_code(last, word), modifiers))


def as_typed(key: Key) -> Key:
    """The key as a terminal reports it."""
    code, modifiers, kind = key
    if code == "tab" and modifiers & SHIFT:
        code = "back_tab"
    if code == "back_tab" or (len(code) == 1 and code.isupper()):
        modifiers |= SHIFT
    elif len(code) == 1 and modifiers & SHIFT and len(code.upper()) == 1:
        code = code.upper()
    return Key(code, modifiers, kind)


def key_to_wire(key: Key) -> dict[str, Any]:
    """The value of `key` in plugin/handle_key. Raises KeysFault for a key that cannot be sent."""
    if key.kind not in _KINDS:
        raise KeysFault(f"a key has the kind {quoted(str(key.kind))}; there are {', '.join(_KINDS)}")
    return {"code": _code_to_wire(key.code), "mods": _modifiers_to_wire(key.modifiers), "kind": key.kind}


def _modifiers_to_wire(modifiers: int) -> int:
    """Raises KeysFault."""
    if type(modifiers) is not int or modifiers & ~ALL_MODIFIERS:
        raise KeysFault(f"modifiers are bits, and their sum is at most {ALL_MODIFIERS}: {modifiers!r:.40}")
    return modifiers


def _code_to_wire(code: str) -> dict[str, Any]:
    if len(code) == 1 and not "\ud800" <= code <= "\udfff":
        return {"type": "char", "ch": code}
    if code in NAMES:
        return {"type": code}
    if code in _SPELLED and code != "space":
        return {"type": "f", "n": int(code[1:])}
    raise KeysFault(f"there is no key {quoted(code)}{_hint(code)}")


def _split(word: str) -> list[str]:
    """The parts of `ctrl+x`. The key + is written as itself: `+`, `ctrl++`."""
    if word.endswith("++"):
        return [*word[:-2].split("+"), "+"]
    return [word] if word == "+" else word.split("+")


def _read_code(text: str, word: str) -> str:
    character = unicodedata.normalize("NFC", text) if len(text) <= 8 else text
    if len(character) == 1:
        if not character.isprintable():
            message = "a control character or half of one; write the key that makes it: ctrl+c, enter"
            raise KeysFault(f"the key {quoted(word)} is {message}")
        return character
    name = text.lower().replace("-", "_")
    if name in _SPELLED:
        return " " if name == "space" else name
    if name == "insert":
        raise KeysFault(
            "the key insert is not sent: it needs version 3 of the contract, and this is version 2"
        )
    if not text:
        raise KeysFault(f"the key {quoted(word)} ends with +; write the key after it, or `++` for the key +")
    raise KeysFault(f"there is no key {quoted(text)}{_hint(name)}")


def _hint(name: str) -> str:
    near = did_you_mean(name, _SPELLED)
    return f"; {near}" if near else "; separate keys with blanks, as in 'j j enter ctrl+c'"
