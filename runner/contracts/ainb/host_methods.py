"""The requests of an ainb plugin to its host, and the service that answers each; empty: it needs none."""

from __future__ import annotations

from runner.contracts.ainb.host.params import (
    FIELDS,
    GET,
    INVOKE,
    LOG,
    PUBLISH,
    READ_DIR,
    READ_FILE,
    STREAM,
    STREAM_CANCEL,
    SUBSCRIBE,
)
from sandbox.speed.typed import Mapping

_SERVICES = {
    **dict.fromkeys((GET, PUBLISH, SUBSCRIBE, INVOKE, STREAM, STREAM_CANCEL), "bus"),
    **dict.fromkeys((READ_DIR, READ_FILE), "files"),
    LOG: "log_level",
}
METHODS: Mapping[str, str] = {method: _SERVICES.get(method, "") for method in FIELDS}
