"""What a plugin's uid cannot reach, and what to do about it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

_CODE = """
import os, sys
from sandbox.paths.access import Unreadable, require_access
try:
    require_access([(sys.argv[1], 7)], os.geteuid(), os.getegid(), ())
except Unreadable as fault:
    print(fault.hint)
"""


@pytest.mark.launches
@pytest.mark.parametrize(
    ("bind", "said"),
    [
        (
            "--ro-bind",
            "its filesystem is mounted read-only: choose another folder, or ask for reading only",
        ),
        ("--bind", ""),
    ],
)
def test_a_read_only_filesystem_is_named(tmp_path: Path, bind: str, said: str) -> None:
    bwrap = shutil.which("bwrap")
    assert bwrap is not None
    # Not all of "/": bubblewrap walks every mount below what it binds, and other tests mount and unmount.
    shown = [word for path in ("/usr", sys.base_prefix, str(ROOT)) for word in ("--ro-bind", path, path)]
    links = [word for name in ("bin", "lib", "lib64") for word in ("--symlink", f"usr/{name}", f"/{name}")]
    code = [sys.executable, "-c", _CODE, str(tmp_path)]
    words = [bwrap, *shown, *links, bind, str(tmp_path), str(tmp_path), "--chdir", str(ROOT), *code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr
