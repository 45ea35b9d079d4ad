"""The file of one approval: checked, read, written and removed."""

from __future__ import annotations

from runner.approvals.record import ApprovalKey, ApprovalRecord


def read_record(path: str, key: ApprovalKey) -> ApprovalRecord:
    """Raises ApprovalsUnusable (store.py) if it cannot be trusted, or is not the record of `key`."""
    raise NotImplementedError
