"""What `runner gateway` was told. Without the SDK, whose import takes most of a second."""

from __future__ import annotations

from typing import NamedTuple

from runner.gateway.audit import AuditFile
from runner.gateway.settings import DEFAULT_CLIENT, LIST_SECONDS, GatewaySettings


class StdioOptions(NamedTuple):
    config: tuple[str, ...]
    names: tuple[str, ...] = ()  # which plugins; none: all
    policy: str | None = None
    settings: GatewaySettings = GatewaySettings()
    client: str = DEFAULT_CLIENT
    list_seconds: float = LIST_SECONDS
    audit: AuditFile | None = None
    bodies: bool = False
    remarks: tuple[str, ...] = ()  # about the entry that started it

    def close(self) -> None:
        if self.audit is not None:
            self.audit.close()
