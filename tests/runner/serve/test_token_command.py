"""The operator's command that prints a token: it may hang, write without end, and leave children behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import trio
import trio.testing

from runner.serve import token_command
from runner.serve.token_command import TokenCommandFailed, run_token_command
from tests.tables import wait_for

ECHO = "import sys; print(sys.stdin.read()[::-1])"
# The child holds the pipe too. Its number is in a file.
CHILD = "import os, sys, time; (open(sys.argv[1], 'w').write(str(os.getpid())), time.sleep(60))"
PARENT = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {CHILD!r}, sys.argv[1]])"


def python(text: str, *words: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", text, *words]


@pytest.mark.trio
async def test_the_output_of_a_token_command_is_judged() -> None:
    assert await run_token_command(python(ECHO), b"abc") == b"cba"
    assert await run_token_command(python("print('t')"), b"x" * (1 << 20)) == b"t"  # it does not read all
    rows = {
        "print('t'); raise SystemExit(3)": r"gave no token \(status 3\)",
        "pass": r"gave no token \(status 0\)",
        "print('t' * (1 << 20))": "wrote more than 65536 bytes",
        "while True: print('t' * 4096)": "wrote more than 65536 bytes",
    }
    for text, message in rows.items():
        with trio.fail_after(20), pytest.raises(TokenCommandFailed, match=message) as refused:
            await run_token_command(python(text))
        assert refused.value.why == "failed"
        assert "ttt" not in str(refused.value)


@pytest.mark.trio
@pytest.mark.parametrize("more", ["; time.sleep(60)", ""], ids=["both hang", "only the child does"])
async def test_one_that_hangs_ends_with_its_children(
    tmp_path: Path, mock_clock: trio.testing.MockClock, more: str
) -> None:
    noted = tmp_path / "child"

    async def pass_time() -> None:
        while not (noted.exists() and noted.read_text()):
            await trio.lowlevel.checkpoint()
        mock_clock.jump(token_command._SECONDS + 1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pass_time)
        with pytest.raises(TokenCommandFailed, match="took more than 30 s") as refused:
            await run_token_command(python(PARENT + more, str(noted)))
    assert refused.value.why == "timeout"
    child = int(noted.read_text())
    assert wait_for(lambda: not _runs(child))


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
