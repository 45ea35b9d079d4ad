"""Which processes are ours: those that this one has started, and those of the command it belongs to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox import facts

ASKS = """
import os, sys
sys.path.insert(0, sys.argv[1])
from sandbox import facts
facts.first_of_ours = int(sys.argv[2])
print(facts.strangers([int(pid) for pid in sys.argv[3:]]))
"""


def strangers_to_a_child(first: int, *pids: int) -> list[int]:
    root = Path(facts.__file__).parents[1]
    words = [sys.executable, "-I", "-c", ASKS, str(root), str(first), *map(str, pids)]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return [int(word) for word in told.strip("[]\n").split(",") if word]


def test_children_and_the_own_command_are_ours() -> None:
    me = os.getpid()
    with subprocess.Popen(["/bin/sleep", "1000"]) as child:
        try:
            assert facts.strangers([me, child.pid]) == []
            others = [pid for pid in dict.fromkeys((1, os.getppid())) if pid not in (0, me)]
            assert facts.strangers([me, *others]) == others
            # To another child of this process, its sibling is ours only if this process is.
            assert strangers_to_a_child(me, me, child.pid) == []
            assert strangers_to_a_child(0, me, child.pid) == [me, child.pid]
            # A pid that is no ancestor is somebody else's by now.
            assert strangers_to_a_child(child.pid, me, child.pid) == [me, child.pid]
        finally:
            child.kill()
    assert facts.strangers([child.pid]) == []  # it has ended


def test_a_group_is_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = tmp_path / "cgroup.procs"
    for text, alone in (
        ("", True),
        (f"{os.getpid()}\n", True),
        (f"{os.getpid()}\n1\n", False),
        ("0\n", False),
    ):
        members.write_text(text)
        assert facts.is_alone(str(tmp_path)) is alone
    members.unlink()
    assert facts.is_alone(str(tmp_path))
