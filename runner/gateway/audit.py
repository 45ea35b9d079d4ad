"""A line of JSON for each call through a gateway without a daemon: who called what, its outcome, how much."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from collections.abc import Mapping
from typing import Any

import trio

from runner.gateway.calls import Maker
from runner.ledger.rows import digest
from runner.outcome import Outcome
from runner.protocol.calls import CallRequest
from runner.serve.desk import CallAnswer, failed

_SECRET = re.compile(r"pass(word|wd|phrase)|secret|token|api[_-]?key|credential|authorization|cookie", re.I)
_MOST_BODY = 64 << 10  # characters of a body in the audit
HIDDEN = "[hidden]"


class AuditFile:
    """Only its owner can read it. Lines of several processes do not mix: each is one write to its end."""

    def __init__(self, path: str) -> None:
        """Raises ValueError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from None
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            os.close(self._fd)
            raise ValueError(
                f"{path} is not used: it has to be a file that only you can read; chmod 600 {path}"
            )

    def close(self) -> None:
        """Its calls have ended."""
        os.close(self._fd)

    def write(self, line: Mapping[str, Any]) -> None:
        """Raises OSError."""
        raw = json.dumps(line).encode() + b"\n"
        if os.write(self._fd, raw) != len(raw):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class AuditedMaker:
    """Makes calls, and writes one line for each. A line that cannot be written is an error of the call."""

    def __init__(self, maker: Maker, file: AuditFile, *, bodies: bool) -> None:
        self._maker = maker
        self._file = file
        self._bodies = bodies

    async def make(self, call: CallRequest) -> CallAnswer:
        began, at = time.monotonic(), time.time()
        code, output = "cancelled", None
        unwritten = ""
        try:
            made = await self._maker.make(call)
            code = made.error.get("code", "ok")
            output = made.value if made.is_ok else made.data
        finally:
            line = {"at": at, "seconds": round(time.monotonic() - began, 6), "client": call.caller}
            line |= {"plugin": call.plugin, "kind": call.kind, "name": call.tool, "code": code}
            line |= call.trace
            with trio.CancelScope(shield=True):
                try:
                    await trio.to_thread.run_sync(self._write, line, call.input, output)
                except OSError as error:
                    unwritten = str(error.strerror)
        if unwritten:
            message = f"the call was made, but it cannot be written to the audit: {unwritten}"
            return failed(Outcome("internal", "call", message, "audit"))
        return made

    def _write(self, line: dict[str, Any], given: Any, output: Any) -> None:
        for name, value in (("input", given), ("output", output)):
            found = digest(value)
            line[name] = {"sha256": found.digest, "bytes": found.size}
            if self._bodies:
                line[name]["body"] = json.dumps(hide(value))[:_MOST_BODY]
        self._file.write(line)


def hide(value: Any) -> Any:
    """The same without the values of keys that sound like secrets. Also in a text that is JSON: many tools
    answer so."""
    if isinstance(value, Mapping):
        return {key: HIDDEN if _SECRET.search(str(key)) else hide(each) for key, each in value.items()}
    if isinstance(value, list):
        return [hide(each) for each in value]
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.dumps(hide(json.loads(value)))
        except (ValueError, RecursionError):
            return value
    return value
