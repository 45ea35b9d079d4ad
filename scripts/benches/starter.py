"""A program that starts others by a library that confines them. Two peers are libraries for Python, and their
registries here have no command of theirs.

    starter.py FOLDER LIBRARY WRITABLE once PROGRAM…    become the program, confined, with these streams
    starter.py FOLDER LIBRARY WRITABLE each PROGRAM…    for each line on stdin, start as many at once as
                                                        it says, and answer when all have ended

FOLDER has the library; WRITABLE is the only folder that the program may write to. It may read its own folder.
A user who may not read the checkout runs this too: it imports nothing of ours.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

READABLE = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ssl/certs", "/etc/alternatives")
FILES = ("/etc/ld.so.cache",)
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

Start = Callable[[Sequence[str]], tuple[int, str]]  # returns the exit status, and what it wrote to stderr


def by_sandlock(own: str, writable: str, stays: bool) -> Start:
    library = importlib.import_module("sandlock")
    cage = library.Sandbox(
        fs_readable=[*_present((*READABLE, own)), *FILES, "/proc"],
        fs_writable=[writable, *DEVICES],
        clean_env=True,
        env=_environ(writable),
        cwd=writable,
    )

    def start(program: Sequence[str]) -> tuple[int, str]:
        if not stays:
            sys.exit(cage.run_interactive(program))
        done = cage.run(program)
        return done.exit_code, str(done.error or done.stderr.decode(errors="replace"))

    return start


def by_nono(own: str, writable: str, stays: bool) -> Start:
    library = importlib.import_module("nono_py")
    allowed = library.CapabilitySet()
    for path in (*_present((*READABLE, own)), "/proc"):
        allowed.allow_path(path, library.AccessMode.READ)
    for path in FILES:
        allowed.allow_file(path, library.AccessMode.READ)
    for path in DEVICES:
        allowed.allow_file(path, library.AccessMode.READ_WRITE)
    allowed.allow_path(writable, library.AccessMode.READ_WRITE)
    allowed.block_network()
    variables = _environ(writable)

    def start(program: Sequence[str]) -> tuple[int, str]:
        # By Landlock alone it would refuse no UDP.
        if not stays:
            library.apply_seccomp(allowed)
            os.chdir(writable)
            os.execve(program[0] if "/" in program[0] else f"/usr/bin/{program[0]}", program, variables)
        named = [*variables.items()]
        done = library.sandboxed_exec(allowed, program, writable, env=named, enforcement_mode="seccomp")
        return done.exit_code, done.stderr.decode(errors="replace")

    return start


BY: dict[str, Callable[[str, str, bool], Start]] = {"sandlock": by_sandlock, "nono": by_nono}


def _present(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if os.path.exists(path)]


def _environ(home: str) -> dict[str, str]:
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": home, "TMPDIR": home}


def _processor_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def _together(words: Sequence[str], count: int) -> list[tuple[int, str]]:
    """Each by a cage of its own: one holds one program."""
    _, name, writable, _, *program = words
    with ThreadPoolExecutor(count) as threads:
        started = [
            threads.submit(lambda: BY[name](os.path.dirname(program[0]), writable, True)(program))
            for _ in range(count)
        ]
        return [each.result() for each in started]


def main(words: Sequence[str]) -> int:
    folder, name, writable, mode, *program = words
    sys.path.insert(0, folder)
    start = BY[name](os.path.dirname(program[0]), writable, mode == "each")
    if mode == "once":
        start(program)
    for line in sys.stdin:
        before = _processor_seconds()
        ended = [start(program)] if int(line) == 1 else _together(words, int(line))
        status, errors = max(ended)
        answer: dict[str, Any] = {"status": status, "errors": errors}
        print(json.dumps({**answer, "seconds": _processor_seconds() - before}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
