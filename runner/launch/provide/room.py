"""Room on the disk, in the folders that a plugin may write."""

from __future__ import annotations

from runner.outcome import EXEC_REFUSED, Failure, Outcome
from sandbox.limits.disk import DiskMeter
from sandbox.typed import Mapping
from sandbox.units import format_limit


def require_room(writable: Mapping[str, int], limit: int) -> None:
    """Refuse a plugin whose folders already hold more than its disk limit. Raises Failure."""
    meter = DiskMeter(writable, limit, lambda: ())
    try:
        if meter.measure():
            amount = format_limit("disk", limit)
            message = f"{meter.where} already holds more than the disk limit of {amount}"
            hint = "delete files there, or raise the disk limit: --limit disk=SIZE, or in manifest and policy"
            raise Failure(Outcome("policy_denied", "plan", message, "disk", hint), EXEC_REFUSED)
    finally:
        meter.close()
