"""Mouse events on the wire."""

from __future__ import annotations

from typing import Any

import pytest

from runner.contracts.ainb.keys import ALT, SHIFT, KeysFault
from runner.contracts.ainb.mouse import MouseEvent, MouseFault, mouse_to_wire


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        *(
            (MouseEvent(kind, 3, 4, button), {"type": kind, "button": {"type": button}})
            for kind in ("down", "up", "drag")
            for button in ("left", "right", "middle")
        ),
        *(
            (MouseEvent(kind, 3, 4), {"type": kind})
            for kind in ("moved", "scroll_up", "scroll_down", "scroll_left", "scroll_right")
        ),
    ],
)
def test_wire(event: MouseEvent, kind: dict[str, Any]) -> None:
    assert mouse_to_wire(event) == {"kind": kind, "col": 3, "row": 4, "mods": 0}


def test_modifiers_and_the_farthest_place() -> None:
    event = MouseEvent("moved", 0, 65535, modifiers=SHIFT | ALT)
    assert mouse_to_wire(event) == {"kind": {"type": "moved"}, "col": 0, "row": 65535, "mods": 5}


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        (("down", 0, 0), "a mouse event of the kind down has a button: left, right, middle"),
        (("down", 0, 0, "fourth"), "has a button"),
        (("moved", 0, 0, "left"), "a mouse event of the kind moved has no button"),
        (("click", 0, 0, "left"), "there is no mouse event of the kind 'click'; there are down, up"),
        (("moved", -1, 0), "the column of a mouse event is an integer from 0 to 65535"),
        (("moved", 0, 65536), "the row of a mouse event"),
        (("moved", True, 0), "the column of a mouse event"),
        (("moved", 0, 1.0), "the row of a mouse event"),
    ],
)
def test_what_cannot_be_sent(event: tuple[Any, ...], fault: str) -> None:
    with pytest.raises(MouseFault) as raised:
        mouse_to_wire(MouseEvent(*event))
    assert fault in str(raised.value)


def test_modifiers_that_do_not_exist() -> None:
    with pytest.raises(KeysFault):
        mouse_to_wire(MouseEvent("moved", 0, 0, modifiers=16))
