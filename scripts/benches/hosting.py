"""Host processes of the benchmark, run by the user that is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.benches.caller import Caller, failed


@contextmanager
def hosting(caller: Caller, argv: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that prints documents and ends when its stdin does. Raises Unable if it fails."""
    pipe = subprocess.PIPE
    with caller.start(argv, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None and process.stderr is not None
        try:
            yield process
            process.stdin.close()
            errors = process.stderr.read()
        except EOFError:
            errors = process.stderr.read()
            raise failed(argv, process.wait(), errors) from None
        except BaseException:
            process.kill()
            raise
        if process.wait() or errors:
            raise failed(argv, process.returncode, errors)


def live_host(caller: Caller, kind: str, given: Mapping[str, Any]) -> list[str]:
    """The command line of scripts/benches/live_host.py."""
    # Passed as source: the user that is measured may not be allowed to read the checkout.
    for name in ("host.py", "live_host.py"):
        script = caller.write(f"live/scripts/benches/{name}", Path(__file__).with_name(name).read_text())
    return [sys.executable, "-I", script, kind, json.dumps(given)]


def read_document(process: subprocess.Popen[bytes]) -> Any:
    """Read the next JSON document. Raises EOFError if there is none."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise EOFError
    return json.loads(line)


def go_on(process: subprocess.Popen[bytes]) -> None:
    """Let a host that waits continue."""
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
