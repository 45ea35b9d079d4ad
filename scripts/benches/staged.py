"""What staged writes cost: a build in a staged folder against one in the folder itself, and what comes after
it: to look at what it made, and to apply it."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from functools import partial

from scripts.benches.caller import RUNNER, USER_UID, Caller
from scripts.benches.rows import Against, Row, Table

_SMALL = 100  # files in one folder
# As a build does: it makes folders and files, and reads what it made.
_BUILD = f"""
import os, sys
top, count = sys.argv[1], int(sys.argv[2])
for number in range(count // {_SMALL}):
    os.mkdir(f"{{top}}/d{{number}}")
    for each in range({_SMALL}):
        with open(f"{{top}}/d{{number}}/f{{each}}", "w") as file:
            file.write("x" * 1000)
for number in range(count // {_SMALL}):
    for each in range({_SMALL}):
        with open(f"{{top}}/d{{number}}/f{{each}}") as file:
            file.read()
"""


def bench(caller: Caller, files: int, repeats: int) -> list[Table]:
    files = max(files, _SMALL)  # a build that makes none leaves no changes
    script = caller.write("staged/build.py", _BUILD)
    plain, staged, diff, apply = [], [], [], []
    for _ in range(repeats):
        plain.append(_timed(lambda: _build(caller, script, files)))
        _fresh(caller)
        staged.append(_timed(lambda: _build(caller, script, files, "--staged")))
        name = _waiting(caller)
        diff.append(_timed(partial(caller.output_of, [RUNNER, "diff", name, "--stat"])))
        apply.append(_timed(partial(caller.output_of, [RUNNER, "apply", name])))
    folder = "in the folder itself"
    rows = [
        Row(folder, "ms", plain),
        Row("in a staged folder", "ms", staged, (Against("the folder itself", (folder,)),), "a staged build"),
        Row("runner diff --stat", "ms", diff),
        Row("runner apply", "ms", apply),
    ]
    about = f"a build that makes {files:,} files of 1 kB and reads them; {repeats} times"
    return [Table("staged", "staged writes", caller.name, about, rows)]


def _timed(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return (time.perf_counter() - start) * 1000


def _folder(caller: Caller) -> str:
    return os.path.join(caller.folder, "staged-build")


def _fresh(caller: Caller) -> str:
    """An empty folder of an ordinary user's."""
    folder = _folder(caller)
    shutil.rmtree(folder, ignore_errors=True)
    os.mkdir(folder, 0o755)
    if os.geteuid() == 0:
        owner = caller.uid or USER_UID
        os.chown(folder, owner, owner)
    return folder


def _build(caller: Caller, script: str, files: int, *options: str) -> None:
    folder = _folder(caller) if options else _fresh(caller)
    words = ("--read", script, "--write", folder, *options, "--", "python3", script, folder, str(files))
    caller.output_of([RUNNER, "run", *words])


def _waiting(caller: Caller) -> str:
    found = json.loads(caller.output_of([RUNNER, "changes", "--json"]))["changesets"]
    return next(str(each["id"]) for each in found if _folder(caller) in each["folders"])
