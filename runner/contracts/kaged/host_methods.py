"""The requests of a kaged plugin to its host, and the service that answers each."""

from __future__ import annotations

from sandbox.speed.typed import Mapping

GET, SET, DELETE, LIST = (f"kaged.storage.{name}" for name in ("get", "set", "delete", "list"))

METHODS: Mapping[str, str] = dict.fromkeys((GET, LIST, SET, DELETE), "storage")
