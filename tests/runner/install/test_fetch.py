"""What npm and pip leave behind, read outside of their cage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.install.fetch import _read_json
from runner.install.store import BadContent


def test_a_document_of_a_package_takes_bounded_memory(tmp_path: Path) -> None:
    about = tmp_path / "package.json"
    about.write_bytes(b"\xef\xbb\xbf" + json.dumps({"bin": "index.js"}).encode())  # npm takes this mark, too
    assert _read_json(str(about)) == {"bin": "index.js"}
    # A value of nine bytes takes some 250 in memory: 64 MiB of them would take 2 GiB.
    for text in ('{"a":7},' * 700_000, "[]," * 2_100_000):
        about.write_text(f'{{"bin": "index.js", "x": [{text}0]}}')
        with pytest.raises(BadContent, match="too_many_values"):
            _read_json(str(about))
    about.write_text("[" * 100_000)
    with pytest.raises(BadContent, match="too_deep"):
        _read_json(str(about))
