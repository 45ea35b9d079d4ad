"""What is allowed in a package and unwise."""

from __future__ import annotations

from runner.plugin import Plugin
from sandbox.document.diagnostic import Diagnostic
from sandbox.document.read import Document


def lint(document: Document, plugin: Plugin) -> tuple[Diagnostic, ...]:
    raise NotImplementedError
