"""Secrets of the operator on their way to a plugin."""

from __future__ import annotations

from typing import Any


class Secrets(dict[str, Any]):
    """By name. Its text, in a traceback or a log, shows none of them."""

    def __repr__(self) -> str:
        return f"<{len(self)} secrets>"

    __str__ = __repr__
