"""Whose variables and working folder count: those of this process, or of a client that it serves.

A process that serves many clients decides for each of them by what that client has. Each of its tasks, and
each thread that works for one, is in the surroundings of one client; what these start is, too. The process's
own variables and folder then mean nothing.
"""

from __future__ import annotations

import os
from contextvars import ContextVar

from sandbox.speed.typed import TYPE_CHECKING
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class ClientSurroundings(NamedTuple):
    environ: Mapping[str, str]
    folder: str  # absolute


_client: ContextVar[ClientSurroundings | None] = ContextVar("client", default=None)


def enter(surroundings: ClientSurroundings) -> None:
    """From now on they count for this task, and for all that it starts."""
    _client.set(surroundings)


def variables() -> Mapping[str, str]:
    client = _client.get()
    return os.environ if client is None else client.environ


def working_folder() -> str:
    """Raises FileNotFoundError if this process's own was removed."""
    client = _client.get()
    return os.getcwd() if client is None else client.folder
