"""Room on the disk, in the folders that a plugin may write."""

from __future__ import annotations

from runner.outcome import EXEC_REFUSED, Failure, Outcome
from sandbox.limits.disk import DiskMeter
from sandbox.scopes import contextmanager
from sandbox.typed import Iterator, Mapping


@contextmanager
def measured_room(writable: Mapping[str, int], limit: int) -> Iterator[DiskMeter]:
    """Refuse a plugin whose folders already hold more than its disk limit. Raises Failure.

    The meter goes on from what it has measured here. So it need not measure again as soon as the plugin
    starts, and counts what the plugin writes first.
    """
    meter = DiskMeter(writable, limit)
    try:
        if meter.measure():
            from sandbox.units import format_limit

            amount = format_limit("disk", limit)
            message = f"{meter.where} already holds more than the disk limit of {amount}"
            hint = "delete files there, or raise the disk limit: --limit disk=SIZE, or in manifest and policy"
            raise Failure(Outcome("policy_denied", "plan", message, "disk", hint), EXEC_REFUSED)
        yield meter
    finally:
        meter.close()
