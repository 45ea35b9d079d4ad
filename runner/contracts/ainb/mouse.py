"""Mouse events, as plugin/handle_mouse carries them."""

from __future__ import annotations

from typing import Any, Final, Literal, cast

from runner.contracts.ainb.buffer import MOST_U16
from runner.contracts.ainb.keys import modifiers_to_wire
from sandbox.document.diagnostic import quoted
from sandbox.speed.value import NamedTuple

# Of a button, and of none.
ButtonKind = Literal["down", "up", "drag"]
MouseKind = ButtonKind | Literal["moved", "scroll_up", "scroll_down", "scroll_left", "scroll_right"]
Button = Literal["left", "right", "middle"]

_BUTTON_KINDS: Final = ("down", "up", "drag")
_OTHER_KINDS: Final = ("moved", "scroll_up", "scroll_down", "scroll_left", "scroll_right")
_BUTTONS: Final = ("left", "right", "middle")


class MouseFault(ValueError):
    """An event that cannot be sent."""


class MouseEvent(NamedTuple):
    kind: MouseKind
    column: int
    row: int
    button: Button | None = None  # for down, up and drag
    modifiers: int = 0  # bits, as of a key


def mouse_to_wire(event: MouseEvent) -> dict[str, Any]:
    """The value of `mouse` in plugin/handle_mouse. Raises MouseFault, or KeysFault for the modifiers."""
    for name, number in (("column", event.column), ("row", event.row)):
        if type(number) is not int or not 0 <= number <= MOST_U16:
            raise MouseFault(f"the {name} of a mouse event is an integer from 0 to {MOST_U16}")
    return {
        "kind": _kind_to_wire(event),
        "col": event.column,
        "row": event.row,
        "mods": modifiers_to_wire(event.modifiers),
    }


def _kind_to_wire(event: MouseEvent) -> dict[str, Any]:
    kind, button = cast("str", event.kind), event.button
    if kind in _BUTTON_KINDS:
        if button not in _BUTTONS:
            raise MouseFault(f"a mouse event of the kind {kind} has a button: {', '.join(_BUTTONS)}")
        return {"type": kind, "button": {"type": button}}
    if kind not in _OTHER_KINDS:
        known = ", ".join((*_BUTTON_KINDS, *_OTHER_KINDS))
        raise MouseFault(f"there is no mouse event of the kind {quoted(kind)}; there are {known}")
    if button is not None:
        raise MouseFault(f"a mouse event of the kind {kind} has no button")
    return {"type": kind}
