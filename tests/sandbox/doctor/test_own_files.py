"""What the doctor says about the runner's own files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox.doctor import own_files


@pytest.mark.needs("root")
def test_a_state_directory_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_files, "state_root", lambda environ: f"{tmp_path}/a/b")
    assert own_files.state_directory({}).status == "ok"
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(own_files, "state_root", lambda environ: "/proc/sys/kernel/plugins")
    found = own_files.state_directory({})
    assert (found.status, found.cause) == ("degraded", "state_dir")
    assert "plugins that ask for state are not started" in found.summary


@pytest.mark.needs("root")
def test_code_of_root_that_others_can_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "runner/cli/exec.py"
    module.parent.mkdir(parents=True)
    module.touch()
    monkeypatch.setattr(own_files, "CODE_ROOT", str(tmp_path))
    monkeypatch.setattr(own_files, "_starts", lambda: iter([str(tmp_path)]))
    assert [each.status for each in own_files.own_code(0)] == ["ok"]
    assert own_files.own_code(1000) == []
    os.chown(module, 1000, 1000)
    [found] = own_files.own_code(0)
    assert found.status == "degraded" and f"{module}: it belongs to uid 1000" in found.summary
    os.chown(module, 0, 0)
    foreign = tmp_path / "foreign.py"
    foreign.touch()
    os.chown(foreign, 1000, 1000)
    (link := tmp_path / "runner/link.py").symlink_to(foreign)
    [found] = own_files.own_code(0)
    assert f"{link}: it belongs to uid 1000" in found.summary
    link.unlink()
    module.parent.chmod(0o777)
    [found] = own_files.own_code(0)
    assert f"its directory {module.parent} can be written" in found.summary


@pytest.mark.needs("root")
def test_each_file_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders above a file are not asked about again for each of them."""
    for number in range(30):
        module = tmp_path / f"runner/part{number % 3}/module{number}.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        module.touch()
    walked: list[str] = []
    monkeypatch.setattr(own_files, "CODE_ROOT", str(tmp_path))
    monkeypatch.setattr(own_files, "_starts", lambda: iter(()))
    monkeypatch.setattr(own_files, "trust_fault", lambda path, name: walked.append(path))
    assert [each.status for each in own_files.own_code(0)] == ["ok"]
    assert walked == [f"{tmp_path}/runner", f"{tmp_path}/sandbox"]
    (tmp_path / "runner/part1").chmod(0o777)  # the control: those are asked about one by one
    own_files.own_code(0)
    assert len(walked) == 4 + 10
