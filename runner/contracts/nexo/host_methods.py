"""The requests of a nexo plugin to its host, and the service that answers each."""

from __future__ import annotations

from sandbox.speed.typed import Mapping

METHODS: Mapping[str, str] = {"memory.recall": "memory", "llm.complete": "llm", "broker.publish": "broker"}
