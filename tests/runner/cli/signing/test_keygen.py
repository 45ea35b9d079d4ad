"""`runner keygen`: messages and exit statuses. Keys themselves: tests/runner/package/test_keys.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.cli import main


def test_a_key_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key"
    assert main(["keygen", str(path), "--key-id", "acme", "--comment", "of  the release"]) == 0
    said = capsys.readouterr().out
    line = (tmp_path / "key.pub").read_text()
    assert line.startswith("acme ") and line.endswith(" of the release\n") and line in said
    assert "PRIVATE KEY" in path.read_text() and "PRIVATE KEY" not in said
    before = path.read_bytes()
    assert main(["keygen", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("--key-id", "a b"), 2, "cannot be the id"),
        (("--comment", "a\x1bb"), 2, "--comment"),
    ],
)
def test_what_would_break_a_line_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], status: int, said: str
) -> None:
    assert main(["keygen", str(tmp_path / "key"), *words]) == status
    assert said in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen", str(tmp_path / "missing/key")]) == 1
    assert "missing/key: No such file" in capsys.readouterr().err
