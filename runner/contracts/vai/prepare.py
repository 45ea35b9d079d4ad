"""A call of an export, completed before anything is started: its request, and what its cage needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.contracts.contract import Prepared
from runner.plugin import Plugin
from runner.protocol.dialect import Call
from runner.protocol.host_services import Delegation


def prepare(
    plugin: Plugin,
    call: Call,
    *,
    seconds: float | None,
    options: Mapping[str, str],
    secrets: Mapping[str, str],
    config: Any,
    now: float,
) -> Prepared:
    raise NotImplementedError


def with_delegation(prepared: Prepared, delegation: Delegation) -> Prepared:
    raise NotImplementedError
