"""--keys, and keys on the wire."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.contracts.ainb.user_input import (
    ALT,
    CTRL,
    NAMES,
    SHIFT,
    SUPER,
    Key,
    KeysFault,
    key_to_wire,
    read_key,
    read_keys,
)


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("j", Key("j")),
        ("1", Key("1")),
        ("é", Key("é")),
        ("e\u0301", Key("é")),
        ("漢", Key("漢")),
        ("space", Key(" ")),
        ("+", Key("+")),
        ("-", Key("-")),
        *((name, Key(name)) for name in NAMES if name != "back_tab"),
        ("Enter", Key("enter")),
        ("page-up", Key("page_up")),
        ("f1", Key("f1")),
        ("F12", Key("f12")),
        ("f", Key("f")),
        ("ctrl+c", Key("c", CTRL)),
        ("Ctrl+c", Key("c", CTRL)),
        ("ctrl++", Key("+", CTRL)),
        ("ctrl+-", Key("-", CTRL)),
        ("alt+enter", Key("enter", ALT)),
        ("super+space", Key(" ", SUPER)),
        ("ctrl+alt+super+up", Key("up", CTRL | ALT | SUPER)),
        ("shift+up", Key("up", SHIFT)),
        # As a terminal reports them.
        ("G", Key("G", SHIFT)),
        ("shift+g", Key("G", SHIFT)),
        ("shift+1", Key("1", SHIFT)),
        ("shift+ß", Key("ß", SHIFT)),
        ("back_tab", Key("back_tab", SHIFT)),
        ("shift+tab", Key("back_tab", SHIFT)),
        ("ctrl+shift+tab", Key("back_tab", CTRL | SHIFT)),
    ],
)
def test_a_key(word: str, key: Key) -> None:
    assert read_key(word) == key


def test_keys() -> None:
    assert read_keys(" j j\tenter ctrl+c\nesc ") == (
        *(Key("j"), Key("j"), Key("enter"), Key("c", CTRL), Key("esc")),
    )
    assert read_keys("") == ()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("entr", "there is no key 'entr'; did you mean 'enter'?"),
        ("j pagedown", "there is no key 'pagedown'; did you mean 'page_down'?"),
        ("jjk", "there is no key 'jjk'; separate keys with blanks, as in 'j j enter ctrl+c'"),
        ("f13", "there is no key 'f13'; did you mean 'f3'?"),
        ("f0", "there is no key 'f0'"),
        ("insert", "the key insert is not sent"),
        ("crtl+c", "the key 'crtl+c' has the unknown modifier 'crtl'; did you mean 'ctrl'?"),
        ("window+c", "there are shift, ctrl, alt, super"),
        ("ctrl+Ctrl+c", "the key 'ctrl+Ctrl+c' has the modifier ctrl twice"),
        ("ctrl+", "the key 'ctrl+' ends with +"),
        ("++", "the key '++' has the unknown modifier ''"),
        ("a+b", "has the unknown modifier 'a'"),
        ("\x03", "the key '\\x03' is a control character"),
        ("\ud800", "the key '\\ud800' is a control character or half of one"),
        ("\u202e", "the key '\\u202e' is a control character"),
        ("x" * 1000, "there is no key 'xxx"),
    ],
)
def test_a_key_that_nobody_can_press(text: str, fault: str) -> None:
    with pytest.raises(KeysFault) as raised:
        read_keys(text)
    assert fault in str(raised.value) and len(str(raised.value)) < 200


@pytest.mark.parametrize(
    ("key", "code", "mods"),
    [
        (Key("j"), {"type": "char", "ch": "j"}, 0),
        (Key(" "), {"type": "char", "ch": " "}, 0),
        (Key("c", CTRL), {"type": "char", "ch": "c"}, 2),
        (Key("back_tab", SHIFT), {"type": "back_tab"}, 1),
        (Key("page_down", ALT | SUPER), {"type": "page_down"}, 12),
        (Key("f1"), {"type": "f", "n": 1}, 0),
        (Key("f12"), {"type": "f", "n": 12}, 0),
        (Key("f"), {"type": "char", "ch": "f"}, 0),
        (Key("enter", 15), {"type": "enter"}, 15),
    ],
)
def test_wire(key: Key, code: dict[str, Any], mods: int) -> None:
    assert key_to_wire(key) == {"code": code, "mods": mods, "kind": "press"}


def test_kinds() -> None:
    assert key_to_wire(Key("j", kind="release"))["kind"] == "release"
    assert key_to_wire(Key("j", kind="repeat"))["kind"] == "repeat"


@pytest.mark.parametrize(
    "key",
    [
        *(Key(""), Key("jj"), Key("space"), Key("insert"), Key("f0"), Key("f13"), Key("\ud800")),
        *(Key("j", 16), Key("j", -1), Key("j", True), Key("j", kind="held")),  # type: ignore[arg-type]
    ],
)
def test_unknown_keys_are_refused(key: Key) -> None:
    with pytest.raises(KeysFault):
        key_to_wire(key)


@given(st.text())
def test_any_text_is_keys_that_can_be_sent_or_a_fault(text: str) -> None:
    try:
        keys = read_keys(text)
    except KeysFault as fault:
        said = str(fault)
    else:
        said = ""
        assert [key_to_wire(key)["kind"] for key in keys] == ["press"] * len(text.split())
    assert said.isprintable()


# --- the mouse ----------------------------------------------------------------------------------------------
