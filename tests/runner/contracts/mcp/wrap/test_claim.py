"""The configuration that a wrapped command line names."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from runner.contracts.configurations import WrappedEntry
from runner.contracts.mcp.wrap import claim


def test_a_file_that_its_host_writes_at_this_moment_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path.resolve() / "mcp.json"
    options = ("--wrapped", json.dumps({"file": str(file), "format": "2"}), "--name", "tool")
    entry = {"command": "/usr/bin/runner", "args": ["run", *options, "--", "server"]}
    whole = json.dumps({"mcpServers": {"tool": entry}})
    file.write_text(whole[:40])
    wrapped = WrappedEntry(str(file), "tool", "", options, ("server",), False)
    paused: list[float] = []

    def pause(seconds: float) -> None:
        paused.append(seconds)
        file.write_text(whole[: 40 * len(paused)] if len(paused) < 3 else whole)

    monkeypatch.setattr(time, "sleep", pause)
    assert claim.find_entry(wrapped, {}).variables == frozenset()
    assert len(paused) == 3
    # What stays damaged is told.
    file.write_text(whole[:40])
    monkeypatch.setattr(claim, "_REWRITING_SECONDS", 0)
    with pytest.raises(ValueError, match="--wrapped: "):
        claim.find_entry(wrapped, {})
