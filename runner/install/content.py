"""Why what was fetched does not go into the store."""

from __future__ import annotations


class BadContent(Exception):
    """What was fetched has something that no package may have."""
