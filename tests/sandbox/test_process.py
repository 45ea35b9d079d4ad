"""What a process asks of the kernel for itself: the same with and without python-prctl."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, Caller

Write = Callable[..., Path]

# Each act, and what the kernel says about this process before and after it.
ACTS = """
import ctypes, json, sys
if sys.argv[1] == "without":
    sys.modules["prctl"] = None
elif sys.argv[1] == "with":
    import prctl
from sandbox import process
libc = ctypes.CDLL(None)
def asked():
    number = ctypes.c_int()
    death = libc.prctl(2, ctypes.byref(number), 0, 0, 0) or number.value
    orphans = libc.prctl(37, ctypes.byref(number), 0, 0, 0) or number.value
    return [death, orphans, libc.prctl(39, 0, 0, 0, 0), libc.prctl(3, 0, 0, 0, 0)]
libc.prctl(4, 0, 0, 0, 0)
said = [asked()]
process.load()
for act in (process.die_with_parent, lambda: process.adopt_orphans(True), process.forbid_new_privileges,
            process.allow_dumps, lambda: process.adopt_orphans(False)):
    act()
    said.append(asked())
print(json.dumps(said))
"""
SAID = [[0, 0, 0, 0], [9, 0, 0, 0], [9, 1, 0, 0], [9, 1, 1, 0], [9, 1, 1, 1], [9, 0, 1, 1]]


@pytest.mark.parametrize("how", ["as it is here", "without"])
def test_every_act_reaches_the_kernel(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ACTS, how], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == SAID


def test_an_act_that_the_kernel_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from sandbox import process

    with pytest.raises(OSError, match="Invalid argument"):
        process._call(4, 77)


def without_prctl(caller: Caller, write_file: Write) -> dict[str, str]:
    """The variables of a caller on whose machine python-prctl is not installed."""
    folder = caller.home / "missing"
    write_file(folder / "prctl.py", "raise ImportError('not installed')\n")
    caller.give(folder)
    return {"PYTHONPATH": f"{folder}:{caller.environ['PYTHONPATH']}"}


@pytest.mark.parametrize("caged", [True, False])
def test_a_launch_without_python_prctl(
    runner_as: Caller, plugin_dir: Path, write_file: Write, caged: bool
) -> None:
    manifest = (ROOT / "tests/plugins/demo/nexo-plugin.toml").read_text()
    write_file(
        plugin_dir / "nexo-plugin.toml", manifest.replace("enabled = true", f"enabled = {caged}".lower())
    )
    write_file(plugin_dir / "plugin.py", "#!/usr/bin/python3\nprint('ran')\n", 0o755)
    policy = write_file(runner_as.home / "policy.toml", 'version = 1\nunsandboxed = "allow"\n', 0o600)
    runner_as.give(policy)
    env = without_prctl(runner_as, write_file)
    done = runner_as("exec", "--policy", policy, plugin_dir, env={**env, "DEMO_SECRET": "x"})
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert ("UNSANDBOXED" in done.stderr) is not caged


def test_the_doctor_without_python_prctl(runner_as: Caller, write_file: Write) -> None:
    def found(env: dict[str, str]) -> list[list[str]]:
        """The mark and the name of each layer. Numbers of the machine change from one look to the next."""
        lines = runner_as("doctor", env=env).stdout.splitlines()
        return [line.split()[:2] for line in lines if line and not line[0].isspace()]

    without = found(without_prctl(runner_as, write_file))
    assert len(without) > 5 and without == found({})
