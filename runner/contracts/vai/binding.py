"""A binding record: ties one export to a scope, with its configuration and narrower permissions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.contracts.vai.declared import DeclaredExport, Permissions
from runner.plugin import Plugin
from sandbox.document.diagnostic import Diagnostic
from sandbox.value import NamedTuple


class Binding(NamedTuple):
    id: str = ""
    export: str = ""
    org: str = ""
    project: str = ""
    config: Mapping[str, Any] = {}
    slots: Mapping[str, str | None] = {}  # slot -> secret://ORG/NAME; None: the plugin does without
    active: bool = True
    traffic_percent: int = 100
    # What it narrows. None: nothing.
    permissions: Permissions | None = None
    egress: tuple[str, ...] | None = None  # hosts, as in sandbox/network/rules.py
    timeout: float | None = None  # seconds
    max_concurrency: int | None = None


def read_binding(text: str, file: str, plugin: Plugin) -> tuple[Binding | None, tuple[Diagnostic, ...]]:
    """The binding in `text`, checked against the package. `file`: for messages. None: it has an error."""
    raise NotImplementedError


def effective(export: DeclaredExport, binding: Binding | None) -> DeclaredExport:
    """The export as its binding narrows it: permissions, timeout, max_concurrency."""
    raise NotImplementedError
