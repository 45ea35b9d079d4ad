"""The seccomp filter of a serving broker: a list of allowed system calls. Any other kills it.

It gets its connections from the gate: it makes no socket, dials nothing, and opens no file.
"""

from __future__ import annotations

from sandbox.gate.calls import CALLS, Calls

# What a gate does and a broker does not.
_OF_THE_GATE_ALONE = (
    *("socket", "connect", "accept4", "getpeername", "splice", "pipe2", "fcntl"),
    *("sendmsg", "socketpair"),
)
RECEIVING: dict[str, tuple[int | None, int | None]] = {"recvmsg": (47, 212)}
BROKER_CALLS = {
    name: numbers for name, numbers in CALLS.items() if name not in _OF_THE_GATE_ALONE
} | RECEIVING

FIONBIO, SIOCOUTQ = 0x5421, 0x5411  # setblocking(), and how many bytes are not acknowledged


def broker_filter(arch: str) -> bytes:
    calls = Calls()
    rules = {
        "setsockopt": calls.option_rule(),
        "ioctl": calls.one_of(1, (FIONBIO, SIOCOUTQ)),
        **calls.memory_rules(),
    }
    return calls.program(arch, BROKER_CALLS, rules)
