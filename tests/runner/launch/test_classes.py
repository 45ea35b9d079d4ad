"""The lists of classes that are read back from bytes: a class that a list lacks fails a launch."""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from runner.launch.advice import scene
from runner.launch.command import Command
from runner.launch.remote import messages
from runner.launch.stages import Planned, planned_classes
from runner.manifest.cache import PLUGIN_CLASSES
from runner.package.signature import VerifiedPackage
from runner.plugin import Plugin
from sandbox.document.diagnostic import Diagnostic
from sandbox.limits.site import Hierarchy, Site
from sandbox.network.egress import EgressPlan
from sandbox.network.ssh import SshPlan
from sandbox.paths.denied_places import DeniedPlaces
from sandbox.paths.file_identity import FileIdentity
from sandbox.plan.layers import Layer, Layers
from sandbox.plan.owners import Decision
from sandbox.plan.plan import LaunchPlan
from sandbox.policy.policy import Policy
from sandbox.spec import Access, Denial, Grant, Note, Project

# What modules import for type checkers only.
NAMES: dict[str, Any] = {
    "Access": Access,
    "Mapping": Mapping,
    **{
        each.__name__: each
        for each in (
            *(
                Command,
                Decision,
                DeniedPlaces,
                Denial,
                Diagnostic,
                EgressPlan,
                FileIdentity,
                Grant,
                Hierarchy,
                LaunchPlan,
            ),
            *(Layer, Layers, Note, Plugin, Policy, Project, SshPlan, VerifiedPackage, Site),
        )
    },
}


def reachable(root: type) -> set[type]:
    """Every named tuple that a value of this class can hold, by its annotations."""
    found: set[type] = set()
    pending = [root]
    while pending:
        each = pending.pop()
        if each in found:
            continue
        found.add(each)
        # Not get_type_hints: it takes the words of our own Literal (sandbox/speed/typed.py) for names.
        module = vars(sys.modules[each.__module__])
        for annotation in each.__annotations__.values():
            # As a typing.NamedTuple has it.
            text: Any = getattr(annotation, "__forward_arg__", annotation)
            pending.extend(named_tuples(eval(text, module, NAMES)))  # noqa: S307 -- our own source
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
        ((scene.Scene,), scene.SCENE_CLASSES),
        ((Planned,), planned_classes()),
    ],
    ids=["plugin", "order", "messages", "scene", "planned"],
)
def test_every_class_is_listed(roots: tuple[type, ...], listed: tuple[type, ...]) -> None:
    needed = set().union(*map(reachable, roots))
    assert len(needed) > 3
    assert {each.__name__ for each in needed.difference(listed)} == set()
