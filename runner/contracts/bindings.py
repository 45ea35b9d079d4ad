"""Exports that are bound to orgs and projects, by records that a control plane keeps."""

from __future__ import annotations

from sandbox.speed.typed import TYPE_CHECKING, Any, Callable, Protocol
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from typing import TypeVar

    from runner.plugin import Plugin
    from sandbox.document.diagnostic import Diagnostic

    Found = TypeVar("Found")


class BoundExport(NamedTuple):
    """What a control plane has to know of a binding record."""

    export: str
    kind: str  # the list that the export is in: "tools", "hooks", …
    org: str
    project: str = ""  # empty: the whole org
    active: bool = True
    traffic_percent: int = 100
    slots: Mapping[str, str | None] = {}  # of secrets -> secret://ORG/NAME; None: no secret


class Bindings(Protocol):
    """A contract whose exports are bound to orgs and projects by records. A module, imported when it is asked
    for."""

    def read_record(
        self, text: str, file: str, plugin: Plugin, *, own_id: str, orgs: Mapping[str, Collection[str]]
    ) -> tuple[BoundExport | None, tuple[Diagnostic, ...]]:
        """The record in `text`, JSON, checked against the package and its files. None: it has an error. The
        first step of the check that finds one is the last. `file`: for messages. `own_id`: of a record that
        has no id yet. `orgs`: those that records may be for, with the references to their secrets."""
        ...

    def nearest(
        self, records: Iterable[Found], project: str | None, project_of: Callable[[Found], str | None]
    ) -> list[Found]:
        """The records that count in a project, of those of one org for one export: the project's own, or else
        those of the whole org. `project`: None, if any may be meant."""
        ...

    def is_selected(self, binding: str, context: Mapping[str, Any], percent: int) -> bool:
        """Whether a rollout to `percent` includes a call. The same session always gets the same answer."""
        ...
