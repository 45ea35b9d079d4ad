"""The files of our own that a cache entry depends on: found by their imports, not by a list."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from sandbox import cache
from sandbox.cache import CodeMark, code_marks, is_current
from tests.conftest import ROOT


def imported(file: str) -> set[str]:
    """Every module of ours that a file imports, read by Python's own parser."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            for path in (f"{name.replace('.', '/')}.py", f"{name.replace('.', '/')}/__init__.py"):
                if name.partition(".")[0] in ("runner", "sandbox") and (ROOT / path).is_file():
                    found.add(path)
    return found


@pytest.mark.parametrize(
    "modules", [["sandbox.policy.parse"], ["runner.manifest.sandbox_request", "sandbox.cache"]]
)
def test_every_import_is_followed(modules: list[str]) -> None:
    marked = {mark.file for mark in code_marks(*modules)}
    assert {f"{module.replace('.', '/')}.py" for module in modules} <= marked
    for file in marked - {"runner/__init__.py"}:  # the public face: it imports when it is asked
        assert imported(file) <= marked, file


def test_all_forms_of_an_import_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sandbox" / "inner").mkdir(parents=True)
    for name in ("one", "two", "three", "four", "five", "six", "inner/__init__", "inner/seven", "unused"):
        (tmp_path / "sandbox" / f"{name}.py").write_text("")
    (tmp_path / "sandbox" / "start.py").write_text(
        "import os\nimport sandbox.one\nfrom sandbox import two as second, three\n"
        "from sandbox import (\n    four,\n    five as fifth,\n)\n"
        "def late():\n    from sandbox.six import thing\n    from sandbox.inner import seven\n"
        "from elsewhere import sandbox\n"
    )
    monkeypatch.setattr(cache, "CODE_ROOT", str(tmp_path))
    found = {mark.file.removeprefix("sandbox/") for mark in code_marks("sandbox.start")}
    names = ("start", "one", "two", "three", "four", "five", "six", "inner/__init__", "inner/seven")
    assert found == {f"{name}.py" for name in names}
    assert [mark.file for mark in code_marks("sandbox.one", alone=["sandbox.start"])] == [
        "sandbox/one.py",
        "sandbox/start.py",
    ]


def test_a_module_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match=r"sandbox\.nothing"):
        code_marks("sandbox.policy.parse", "sandbox.nothing")


def test_a_changed_or_removed_file_is_not_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "CODE_ROOT", str(tmp_path))
    file = tmp_path / "sandbox.py"
    file.write_text("a = 1\n")
    marks = code_marks("sandbox")
    assert is_current(marks) and marks == (CodeMark("sandbox.py", 6, os.stat(file).st_mtime_ns),)
    os.utime(file, ns=(1, 1))
    assert not is_current(marks)
    marks = code_marks("sandbox")
    file.write_text("a = 10\n")
    os.utime(file, ns=(1, 1))
    assert not is_current(marks)
    file.unlink()
    assert not is_current(marks)
