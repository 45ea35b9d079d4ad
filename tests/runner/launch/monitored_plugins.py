"""Plugins in cages opened by a trio host: a process of its own, as root and as an ordinary user.

What these hosts do travels as source (tests/elsewhere.py), so the functions here import what they need.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jsonschema

from runner.outcome import schema
from tests import elsewhere
from tests.conftest import children_of
from tests.limits.cage import PREFER, Box

CAT = "#!/bin/sh\nexec cat\n"
SLEEPS = "#!/bin/sh\necho runs\nexec sleep 1000\n"


# --- in the host -------------------------------------------------------------------------------------------


def invocation(given: dict[str, Any]) -> Any:
    from runner.launch.stages import Invocation
    from sandbox.spec import Limits, Overrides

    limits = Overrides(limits=Limits(**given.get("limits", {})))
    return Invocation(given["manifest"], policy=given["policy"], overrides=limits)


def in_cage(given: dict[str, Any], act: Any) -> Any:
    """What `await act(cage)` returns."""
    import os

    import trio

    from runner.launch.remote.remote_cell import aclose_forkserver, open_cage

    async def main() -> Any:
        try:
            with trio.fail_after(120):
                async with open_cage(invocation(given), environ=dict(os.environ)) as cage:
                    return await act(cage)
        finally:
            with trio.CancelScope(shield=True):
                await aclose_forkserver()

    return trio.run(main)


async def read(stream: Any) -> str:
    """All of it, to its end."""
    said = b""
    while data := await stream.receive_some():
        said += data
    return said.decode()


async def line(stream: Any) -> str:
    said = b""
    while not said.endswith(b"\n"):
        data = await stream.receive_some(1)
        assert data, said
        said += data
    return said.decode().rstrip("\n")


def summed(ended: Any) -> list[Any]:
    outcome = ended.outcome
    return [outcome.code, outcome.phase, outcome.cause, ended.status]


def holding(given: dict[str, Any]) -> None:
    """Open a cage, say who its monitor is once the plugin has said a line, and wait for a word."""
    import os
    import sys
    import time

    import trio

    async def act(cage: Any) -> None:
        await line(cage.stdout)
        os.write(1, b'{"monitor": %d, "fork server": %d}\n' % (cage._pid, forkserver_pid(cage)))
        if given.get("child"):
            in_a_child(lambda: time.sleep(100))
        await trio.to_thread.run_sync(sys.stdin.readline)
        os.write(1, (json_of(summed(await cage.ended())) + "\n").encode())

    in_cage(given, act)


def in_a_child(act: Any) -> None:
    """In a process that has copies of all this one has open, but for the streams we are heard by."""
    import os

    if os.fork() == 0:
        try:
            os.closerange(0, 3)
            act()
        finally:
            os._exit(0)


def json_of(value: Any) -> str:
    import json

    return json.dumps(value)


def settled(look: Any) -> Any:
    """What `look` finds in the end, when it should find nothing any more."""
    import time

    for _ in range(6000):
        if not (found := look()):
            break
        time.sleep(0.01)
    return found


def forkserver_pid(cage: Any) -> int:
    with open(f"/proc/self/fdinfo/{cage._ticket.forkserver.pidfd}") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))


TRAVEL = (invocation, in_cage, in_a_child, read, line, summed, json_of, settled, forkserver_pid)


# --- in the test -------------------------------------------------------------------------------------------


def given(box: Box, code: str, *, policy: str = PREFER, **more: Any) -> dict[str, Any]:
    """What a host is told."""
    asked = {key: more.pop(key) for key in ("read", "write", "name") if key in more}
    folder = box.plugin(code, **asked)
    return {"manifest": str(folder), "policy": box.policy_options(policy)[1], **more}


def run(box: Box, act: elsewhere.Act, told: dict[str, Any], *args: object, timeout: float = 120.0) -> Any:
    return elsewhere.run(box.caller, act, told, *args, using=TRAVEL, timeout=timeout)


class Host:
    """A host that holds a cage open."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        told = json.loads(elsewhere.line(process) or b"null")
        assert told is not None, "the host ended"
        self.monitor: int = told["monitor"]
        self.forkserver: int = told["fork server"]
        self.init = below(self.monitor)[0]

    @property
    def plugin(self) -> set[int]:
        """All of its processes, with its init."""
        found, ends = set(), [self.init]
        while ends:
            pid = ends.pop()
            found.add(pid)
            ends += below(pid)
        return found

    def ended(self) -> Any:
        """How it ended, as the host tells."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        return json.loads(elsewhere.line(self.process, 60))


below = children_of


@contextmanager
def host(box: Box, told: dict[str, Any], act: elsewhere.Act = holding, **popen: Any) -> Iterator[Host]:
    process = elsewhere.start(box.caller, act, told, using=TRAVEL, stdin=subprocess.PIPE, **popen)
    with process:
        try:
            yield Host(process)
        finally:
            process.kill()


def descriptors(pid: int) -> dict[int, str]:
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:
            continue
    return found


def is_sound(report: dict[str, Any] | None) -> None:
    jsonschema.Draft202012Validator(schema()).validate(report)
