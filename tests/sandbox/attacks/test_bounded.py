"""Programs that hang, flood, leave processes behind or do not exist."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

from sandbox.attacks.decoy import make_decoys
from tests.conftest import ROOT, vanished

# In a process of its own: run_bounded adopts orphans, and ends them.
_RUN = """
import json, os, sys
from sandbox.attacks import bounded
from sandbox.attacks.bounded import run_bounded
bounded._GRACE_SECONDS = 0.5
options = {"stdin": b"text", "most_output": 1 << 16, "leftovers": os.environ["LEFT"]}
run = run_bounded(sys.argv[2:], seconds=float(sys.argv[1]), **options)
print(json.dumps([len(run.output), run.status, run.fault, run.left_processes, run.complaint]))
"""


LEFT = f"rt-left-{os.getpid()}"  # other tests may leave something behind at the same time


def bounded(seconds: str, *argv: str) -> list[object]:
    words, environ = [sys.executable, "-c", _RUN, seconds, *argv], {**os.environ, "LEFT": LEFT}
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout)
    return found


def test_a_program_that_ends(nothing_left: None) -> None:
    assert bounded("60", "sh", "-c", "cat; echo why >&2; exit 3") == [4, 3, "", False, "why\n"]


def test_a_program_that_hangs_or_floods_is_ended(nothing_left: None) -> None:
    assert bounded("0.2", "sh", "-c", "trap '' TERM; sleep 1000 & wait")[1:3] == [None, "it took too long"]
    assert bounded("60", "yes")[1:3] == [None, "it printed more than 0 MiB"]


def test_a_program_that_does_not_exist() -> None:
    assert bounded("60", "/nothing")[1:3] == [None, "/nothing cannot be started: No such file or directory"]


def test_processes_that_were_left_behind_are_found_and_ended(nothing_left: None) -> None:
    daemon = shlex.join((sys.executable, "-c", "import time; time.sleep(60)", LEFT))
    found = bounded("60", "sh", "-c", f"setsid {daemon} & echo started")
    assert found == [8, 0, "", True, ""]


def test_decoys_go_with_the_process_that_made_them(nothing_left: None) -> None:
    code = """
import os, time
from sandbox.attacks.decoy import make_decoys
with make_decoys() as decoys:
    print(decoys.made["folder"], decoys.made["tmp"], decoys.made["shm"], decoys.made["pid"], flush=True)
    time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        *folders, pid = maker.stdout.readline().split()
        assert all(os.path.exists(f"{folder}/secret") for folder in folders)
        maker.kill()
    assert vanished({int(pid)})
    assert [folder for folder in folders if os.path.exists(folder)] == []


def test_the_words_of_attacks_are_filled_in(nothing_left: None) -> None:
    with make_decoys() as decoys:
        assert decoys.fill("plain") == "plain"
        assert decoys.fill("/proc/{pid}/environ") == f"/proc/{decoys.made['pid']}/environ"
        assert decoys.fill("{nothing}") is None
        assert {"tcp", "udp", "abstract", "unix", "folder", "tmp", "shm"} <= decoys.made.keys()
