"""The system calls of a serving ssh agent: fewer than the gate's. It makes no connection of its own."""

from __future__ import annotations

from sandbox.gate.calls import CALLS, Calls

_UNUSED = ("socket", "connect", "setsockopt", "getpeername", "shutdown", "splice", "pipe2", "fcntl")
AGENT_CALLS = {name: numbers for name, numbers in CALLS.items() if name not in _UNUSED}
_FIONBIO = 0x5421  # used by setblocking()


def agent_filter(arch: str) -> bytes:
    """The filter program for this architecture. Any other call kills the process."""
    calls = Calls()
    return calls.program(arch, AGENT_CALLS, {"ioctl": calls.one_of(1, (_FIONBIO,)), **calls.memory_rules()})
