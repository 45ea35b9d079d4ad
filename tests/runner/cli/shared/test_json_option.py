"""Options whose value is JSON: where it comes from, and how much of it."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from runner.cli.shared import json_option
from runner.cli.shared.json_option import read_json_option


def test_where_a_value_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "given").write_text('{"a": 1}')
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"[2]")))
    assert read_json_option("--x", None) is None
    assert read_json_option("--x", "3") == 3
    assert read_json_option("--x", f"@{tmp_path}/given") == {"a": 1}
    assert read_json_option("--x", "-") == [2]


def test_a_file_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/zero has no end. The control: as many bytes as the limit are read."""
    monkeypatch.setattr(json_option, "_MOST_BYTES", 8)
    (tmp_path / "eight").write_text('"123456"')
    (tmp_path / "nine").write_text('"1234567"')
    assert read_json_option("--x", f"@{tmp_path}/eight") == "123456"
    for path in (f"{tmp_path}/nine", "/dev/zero"):
        with pytest.raises(ValueError, match=r"--x @.* has more than"):
            read_json_option("--x", f"@{path}")


def test_a_hint_about_files_is_for_what_is_no_json() -> None:
    with pytest.raises(ValueError, match=r"write a file as @FILE$"):
        read_json_option("--x", "{")
    with pytest.raises(ValueError, match=r"cannot be used: .*64 bit: 9{20}$"):
        read_json_option("--x", '{"attempt": 99999999999999999999}')
