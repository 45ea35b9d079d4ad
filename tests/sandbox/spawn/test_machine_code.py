"""The programs in assembly: their bytes are those of their sources, and their layouts those of Python.

What the programs do: test_launcher.py and test_reaper.py.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import signal
import struct
import subprocess
from pathlib import Path

import pytest

from sandbox.spawn import init, launcher, reaper
from sandbox.spawn.machine_code import INSTRUCTIONS
from sandbox.spawn.order import ENDING, IO_BYTES
from scripts.machine_code import FOLDER, Assembled, assemble

pytestmark = pytest.mark.needs("binutils")

SOURCES = sorted(FOLDER.glob("*.s"))


@pytest.fixture(scope="module")
def assembled() -> dict[str, Assembled]:
    return {source.stem: assemble(source) for source in SOURCES}


def test_the_bytes_are_what_the_assembler_makes_of_the_sources(assembled: dict[str, Assembled]) -> None:
    names = {f"{name}.{machine}" for name in ("launcher", "reaper") for machine in ("aarch64", "x86_64")}
    assert assembled.keys() == INSTRUCTIONS.keys() == names
    for name, (instructions, symbols) in assembled.items():
        stored = bytes.fromhex(INSTRUCTIONS[name])
        assert stored == instructions, f"{name}: run `.venv/bin/python -m scripts.machine_code`"
        assert symbols["table"] == len(stored)  # the table follows


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("reaper.x86_64.s", "mov     esi, SIGKILL", "mov     esi, SIGALRM"),
        ("reaper.aarch64.s", "b.gt    give_up", "b.ge    give_up"),
        ("launcher.x86_64.s", "SYS_faccessat", "SYS_faccessat2"),
        ("launcher.aarch64.s", "#table_release", "#table_report"),
        ("linux.inc", "SIGKILL, 9", "SIGKILL, 8"),
        ("reaper.inc", "table_account:          .skip 4", "table_account:          .skip 8"),
    ],
)
def test_a_change_of_a_source_changes_the_bytes(file: str, old: str, new: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "assembly")
    changed = tmp_path / "assembly" / file
    assert old in changed.read_text()
    changed.write_text(changed.read_text().replace(old, new, 1))
    source = changed if file.endswith(".s") else changed.with_name("reaper.x86_64.s")
    assert assemble(source, changed.parent).instructions.hex() != "".join(INSTRUCTIONS[source.stem].split())


def test_a_name_that_nobody_defines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "it.x86_64.s").write_text(".intel_syntax noprefix\nmov eax, [r14+table_nothing]\n")
    with pytest.raises(subprocess.CalledProcessError):
        assemble(tmp_path / "it.x86_64.s")


def test_the_constants_are_those_of_python(assembled: dict[str, Assembled]) -> None:
    known = {**vars(errno), **vars(fcntl), **vars(os), **vars(resource), **vars(signal)}
    known |= {"PR_SET_PDEATHSIG": init._PR_SET_PDEATHSIG, "AT_FDCWD": init._AT_FDCWD}
    ours = {"EVERY": -1, "SETUP_FAILED": 125, "ACCOUNT_BYTES": IO_BYTES}
    others = {"PR_SET_NAME": 15, "SIGSET_BYTES": 8}  # Python has neither
    constants = {
        (name, value)
        for _, symbols in assembled.values()
        for name, value in symbols.items()
        if name.isupper() and not name.startswith("SYS_")
    }
    assert {name for name, _ in constants} >= {*ours, *others, "SIGKILL"}
    for name, value in constants:
        assert value == {**known, **ours, **others}[name] % 2**64, name


def test_the_layouts_are_those_of_python(assembled: dict[str, Assembled]) -> None:
    """Each field, at the place that its source names, has what Python puts or expects there."""
    order = reaper.ReaperOrder(0x1111, 5.0, 0x2222, 0x3333, "/sys/7", 3.25)
    awaited = {signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1}
    tables = {
        "reaper": {
            "program": struct.pack("<i", order.program),
            "account": struct.pack("<i", order.account),
            "ending": struct.pack("<i", order.ending),
            "signals": struct.pack("<Q", sum(1 << number - 1 for number in awaited)),
            "name": b"runner-init\0",
            "timer": struct.pack("<4q", 0, 0, 3, 250_000),
            "scratch": b"/sys/7\0",
        },
        "launcher": {
            "streams": struct.pack("<3i", 71, 72, 73),
            "own": struct.pack("<i", 74),
            "report": struct.pack("<i", 75),
            "release": struct.pack("<i", 76),
            "about_to_exec": b"exec",
        },
    }
    # Numbers in the order of Python's fields, and where the sources have them.
    ending = ENDING.pack(*range(1, 18), b"before", b"after")
    message = {
        "status": (4, 1),
        "expired": (4, 2),
        "statfs_result": (8, 3),
        "usage": (8, 4),  # its first field
        "statfs": (8, 9),
        "read_before": (8, 16),
        "read_after": (8, 17),
        "before": (6, int.from_bytes(b"before", "little")),
        "after": (5, int.from_bytes(b"after", "little")),
    }
    for name, (instructions, symbols) in assembled.items():
        program, machine = name.split(".")
        images = {
            "reaper": reaper.image(order, machine),
            "launcher": launcher.image((71, 72, 73), 74, 75, machine, 76),
        }
        _, found, table = images[program].partition(instructions)
        assert found
        fields = {key.removeprefix("table_"): at for key, at in symbols.items() if key.startswith("table_")}
        assert fields.keys() == tables[program].keys()
        for field, at in fields.items():
            assert table[at:].startswith(tables[program][field]), (name, field)
        if program == "launcher":
            assert symbols["report_size"] == launcher._FAILURE.size
            assert (symbols["report_errno"], symbols["report_access"]) == (0, 4)
            continue
        assert symbols["message_size"] == ENDING.size
        places = {
            key.removeprefix("message_"): at for key, at in symbols.items() if key.startswith("message_")
        }
        assert places.keys() == {*message, "size"}
        for field, (size, value) in message.items():
            at = places[field]
            assert int.from_bytes(ending[at : at + size], "little") == value, (name, field)
