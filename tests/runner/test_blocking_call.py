"""`runner.call`: one call for programs without an event loop, alone, in threads, and interrupted."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import runner
from tests.conftest import ROOT, SYSTEM_PATH, Caller
from tests.tables import one_case

ENVIRON = {"PATH": SYSTEM_PATH, "HOME": "/", "RUNNER_CACHE": "off"}
TEXT = {"text": "hello"}
ECHO = [{"type": "text", "text": "hello"}]


@pytest.fixture
def bare(plugin_dir: Path, sessions: None) -> Path:
    """A copy of the plugin, where a dropped uid can read it."""
    shutil.copytree(ROOT / "tests/plugins/nexo_bare", plugin_dir / "bare")
    for path in (plugin_dir / "bare", *(plugin_dir / "bare").iterdir()):
        path.chmod(0o755)
    return plugin_dir / "bare"


def called(bare: Path, name: str = "bare_echo", given: Any = TEXT, **options: Any) -> Any:
    return runner.call(bare, name, given, environ=ENVIRON, **options)


def started(caller: Caller, folder: Path, program: str) -> subprocess.Popen[str]:
    """Start a plain script of this caller beside the plugin."""
    # In a folder of its own: no plugin may write to where a program of the host is.
    (folder / "host").mkdir()
    script = folder / "host/script.py"
    script.write_text(program)
    for path, mode in ((script.parent, 0o755), (script, 0o644)):
        path.chmod(mode)
    caller.give(folder)
    return subprocess.Popen(
        [*caller.prefix, *caller.python, "host/script.py"],
        cwd=folder,
        env=dict(caller.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# --- a plain script ----------------------------------------------------------------------------------------

PLAIN = """
import runner

print(runner.call("bare", "bare_echo", {"text": "hello"})["content"])
print(runner.call("bare", "bare_echo", {"text": "hello"}, limits={"memory": "128M"})["content"])
"""


def test_a_plain_script(runner_as: Caller, bare: Path) -> None:
    """Two calls in a row: the second finds the fork server of the first."""
    process = started(runner_as, bare.parent, PLAIN)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, f"{ECHO}\n" * 2, "")


INTERRUPTED = """
import runner


def tell(progress):
    print(progress["message"], flush=True)


try:
    given = {"steps": 1000, "seconds": 600}
    runner.call("servers", "slow", given, server="legacy", on_progress=tell, seconds=600)
except KeyboardInterrupt as error:
    print(type(error).__name__, error.__cause__, flush=True)
"""


def test_ctrl_c_ends_the_plugin(runner_as: Caller, plugin_dir: Path, nothing_left: None) -> None:
    shutil.copytree(ROOT / "tests/plugins/mcp_bare", plugin_dir / "servers")
    for path in (plugin_dir / "servers", *(plugin_dir / "servers").iterdir()):
        path.chmod(0o755)
    with started(runner_as, plugin_dir, INTERRUPTED) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "step 1\n"  # it is in the call now
            os.kill(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (0, "KeyboardInterrupt None\n", "")


# --- threads and event loops -------------------------------------------------------------------------------


@pytest.mark.launches
def test_several_threads_at_once(bare: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda n: called(bare, given={"text": str(n)}), range(4)))
    assert [answer["content"][0]["text"] for answer in answers] == ["0", "1", "2", "3"]


@pytest.mark.launches
def test_from_asyncio_in_a_thread(bare: Path) -> None:
    """The loop stays free: one task makes progress while the other waits for the plugin."""

    async def main() -> tuple[bool, Any]:
        waiting = asyncio.create_task(asyncio.to_thread(called, bare))
        await asyncio.sleep(0)
        return not waiting.done(), (await waiting)["content"]

    assert asyncio.run(main()) == (True, ECHO)


@pytest.mark.launches
def test_from_trio_in_a_thread(bare: Path) -> None:
    assert trio.run(trio.to_thread.run_sync, partial(called, bare))["content"] == ECHO


def test_on_an_event_loop_it_is_refused() -> None:
    """Before anything is looked at: it would stop every task of that loop."""

    async def main() -> None:
        runner.call("nowhere", "x")

    with pytest.raises(runner.WouldBlock, match=r"runs trio's event loop; use await runner\.run\(\.\.\.\)"):
        trio.run(main)
    with pytest.raises(runner.WouldBlock, match=r"use await runner\.aio\.call\(\.\.\.\) here"):
        asyncio.run(main())
    with pytest.raises(runner.PluginFailure):  # the control: without a loop the call is made
        runner.call("nowhere", "x")


# --- errors are those of `run` -----------------------------------------------------------------------------


@pytest.mark.launches
@one_case(
    ("attempt", "error", "code"),
    [
        (
            lambda bare: called(bare, "bare_fail", {"code": -33404, "message": "later", "data": {}}),
            runner.PluginError,
            "plugin_error",
        ),
        (
            lambda bare: called(bare, "bare_slow", {"seconds": 60}, seconds=0.2),
            runner.PluginFailure,
            "timeout",
        ),
        (lambda bare: called(bare, kind="nonsense"), runner.InvalidCall, "invalid_call"),
        (lambda bare: called(bare / "nowhere"), runner.PluginFailure, "manifest_invalid"),
    ],
    ids=["no", "timeout", "kind", "manifest"],
)
def test_errors(bare: Path, attempt: Callable[[Path], Any], error: type[Exception], code: str) -> None:
    with pytest.raises(error) as caught:
        attempt(bare)
    assert vars(caught.value)["outcome"].code == code


def test_wrong_arguments(bare: Path) -> None:
    with pytest.raises(ValueError, match=r"^policy: its value is empty"):
        called(bare, policy="")
    with pytest.raises(TypeError, match="unexpected keyword argument 'secs'"):
        called(bare, secs=3)


def test_secrets_stay_hidden_in_tracebacks(bare: Path) -> None:
    with pytest.raises(ValueError, match="sends its plugins none") as caught:
        called(bare, secrets={"token": "sesame"})
    frames = caught.traceback
    library = [frame for frame in frames if str(frame.path).endswith("runner/library.py")]
    assert library and not any("sesame" in repr(dict(frame.frame.f_locals)) for frame in library)
