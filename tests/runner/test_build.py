"""The version that tells two builds apart."""

from __future__ import annotations

import shutil
from pathlib import Path

from runner import __version__
from runner.build import build_version
from sandbox import CODE_ROOT


def test_another_file_name_or_content_is_another_build(tmp_path: Path) -> None:
    """tests/test_packaging.py compares a checkout with a wheel of it."""
    root = tmp_path / "copy"
    for package in ("policies", "runner", "sandbox"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(f"{CODE_ROOT}/{package}", root / package, ignore=ignored)
    own = build_version(str(root))
    assert own == build_version() and own.startswith(f"{__version__}+") and len(own) == len(__version__) + 13
    # What does not belong to the program does not count: compiled modules, and what editors leave.
    (root / "runner/__pycache__").mkdir()
    for name in ("__pycache__/build.pyc", ".build.py.swp", "build.py~"):
        (root / "runner" / name).write_text("x")
    (root / "tests").mkdir()
    (root / "tests/test_x.py").touch()
    assert build_version(str(root)) == own
    # Some installers link each file to their store.
    store = tmp_path / "store.py"
    (root / "runner/build.py").rename(store)
    (root / "runner/build.py").symlink_to(store)
    assert build_version(str(root)) == own
    seen = {own}
    page, policy = root / "runner/serve/page/page.js", root / "policies/default.toml"
    for change in (
        lambda: page.write_text(page.read_text() + " "),
        lambda: policy.write_text(policy.read_text().replace("#", "", 1)),
        lambda: (root / "sandbox/new.py").touch(),
        lambda: (root / "sandbox/new.py").rename(root / "sandbox/newer.py"),
        lambda: shutil.rmtree(root / "policies/systemd"),
        lambda: shutil.rmtree(root / "policies"),
    ):
        change()
        seen.add(build_version(str(root)))
    assert len(seen) == 7 and f"{__version__}+unreadable" in seen
