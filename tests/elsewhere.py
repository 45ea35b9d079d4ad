"""Run a function of a test in another process, as root or as an ordinary user.

The function is passed as source, because an ordinary user may not be able to read the tests. So it imports
what it needs itself, takes and returns JSON values, and lists other functions it calls in `using`. `wait_for`
of tests/tables.py is always available.
"""

from __future__ import annotations

import inspect
import json
import os
import select
import subprocess
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from tests.conftest import Caller
from tests.tables import wait_for

Act = Callable[..., Any]


def command(caller: Caller, act: Act, *args: object, using: tuple[Act, ...] = ()) -> list[str]:
    return [*caller.prefix, *caller.python, "-c", program(act, using), json.dumps(args)]


def program(act: Act, using: tuple[Act, ...] = ()) -> str:
    sources = [textwrap.dedent(inspect.getsource(each)) for each in (wait_for, *using, act)]
    return "\n".join(
        (
            "from __future__ import annotations",
            *sources,
            "import json as _json, sys as _sys",
            f"print(_json.dumps({act.__name__}(*_json.loads(_sys.argv[1]))))",
        )
    )


def start(
    caller: Caller,
    act: Act,
    *args: object,
    using: tuple[Act, ...] = (),
    env: Mapping[str, str] | None = None,
    cwd: str = "/",
    **popen: Any,
) -> subprocess.Popen[bytes]:
    """Start `act(*args)` as a process whose stdout is a pipe."""
    environ = {**caller.environ, **(env or {})}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "bufsize": 0, **popen}
    forks = getattr(caller, "start_program", None)  # if the caller is one of tests/template.py
    process = forks and forks(program(act, using), json.dumps(args), env=environ, cwd=cwd, **streams)
    return process or subprocess.Popen(
        command(caller, act, *args, using=using), env=environ, cwd=cwd, **streams
    )


def line(process: subprocess.Popen[bytes], seconds: float = 120.0) -> bytes:
    """The next line of its stdout. Raises TimeoutError after `seconds` of silence."""
    assert process.stdout is not None
    said = b""
    while not said.endswith(b"\n"):
        if not select.select([process.stdout], [], [], seconds)[0]:
            raise TimeoutError(f"nothing after {said!r} for {seconds:g} seconds")
        more = os.read(process.stdout.fileno(), 1)  # reads nothing beyond the line
        if not more:
            break
        said += more
    return said


def run(
    caller: Caller,
    act: Act,
    *args: object,
    using: tuple[Act, ...] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> Any:
    """Run `act(*args)` and return its result. Waits until every process that inherited stdout has ended."""
    with start(caller, act, *args, using=using, env=env, stderr=subprocess.PIPE) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0, (
        f"{act.__name__} ended with {process.returncode}:\n{err.decode(errors='replace')}"
    )
    return json.loads(out.splitlines()[-1])
