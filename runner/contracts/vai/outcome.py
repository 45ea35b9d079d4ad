"""How an invocation ended, in the words of the contract: one terminal status, a code, and the record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.plugin import Plugin
from runner.protocol.dialect import Call, CallEnd


def reuses(plugin: Plugin) -> int:
    raise NotImplementedError


def record(plugin: Plugin, call: Call, end: CallEnd, options: Mapping[str, str]) -> Mapping[str, Any]:
    raise NotImplementedError
