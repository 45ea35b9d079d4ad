"""The lists of classes that are read back from bytes: a class that a list lacks fails a launch."""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from runner.launch.remote import messages
from runner.launch.stages import Planned, _planned_classes
from runner.manifest.cache import PLUGIN_CLASSES
from runner.package.signature import Signed
from runner.plugin import Plugin
from sandbox.plan.owners import Decision

# What modules import for type checkers only.
NAMES: dict[str, Any] = {each.__name__: each for each in (Signed, Decision)}


def reachable(root: type) -> set[type]:
    """Every named tuple that a value of this class can hold, by its annotations."""
    found: set[type] = set()
    pending = [root]
    while pending:
        each = pending.pop()
        if each in found:
            continue
        found.add(each)
        # Not get_type_hints: it takes the words of our own Literal (sandbox/typed.py) for names.
        module = vars(sys.modules[each.__module__])
        for annotation in each.__annotations__.values():
            pending.extend(named_tuples(eval(annotation, module, NAMES)))  # noqa: S307 -- our own source
    return found


def named_tuples(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and hasattr(hint, "_fields"):
        yield hint
    for part in typing.get_args(hint):
        yield from named_tuples(part)


@pytest.mark.parametrize(
    ("roots", "listed"),
    [
        ((Plugin,), PLUGIN_CLASSES),
        ((messages.LaunchOrder,), messages.ORDER_CLASSES),
        (
            (messages.Born, messages.Terms, messages.Launched, messages.Audited, messages.MonitorEnd),
            messages.MESSAGES,
        ),
        ((Planned,), _planned_classes()),
    ],
    ids=["plugin", "order", "messages", "planned"],
)
def test_every_class_is_listed(roots: tuple[type, ...], listed: tuple[type, ...]) -> None:
    needed = set().union(*map(reachable, roots))
    assert len(needed) > 5
    assert {each.__name__ for each in needed.difference(listed)} == set()
