"""vai-plugin.toml -> Plugin."""

from __future__ import annotations

from collections.abc import Mapping

from runner.plugin import Plugin
from sandbox.document.diagnostic import Diagnostic
from sandbox.document.read import Document


def read(document: Document, *, options: Mapping[str, str]) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
    raise NotImplementedError


def check_files(document: Document, plugin: Plugin) -> tuple[Diagnostic, ...]:
    raise NotImplementedError


def json_schema() -> dict[str, object]:
    raise NotImplementedError
