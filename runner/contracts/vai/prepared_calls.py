"""The members of PreparedCalls (runner/contracts/prepared_calls.py)."""

from __future__ import annotations

from runner.contracts.vai.call.prepare import prepare, with_delegation
from runner.contracts.vai.outcome import concurrent, effect, record, reuses
from runner.contracts.vai.package.catalogue import catalogue

__all__ = [
    "CALLER_KEYS",
    "OPTIONS_OF_ONE_CALL",
    "catalogue",
    "concurrent",
    "effect",
    "prepare",
    "record",
    "reuses",
    "with_delegation",
]

CALLER_KEYS = ("org_id", "project_id")
OPTIONS_OF_ONE_CALL = ("invocation_id", "timeout", "delivery_id", "artifact")
