"""What npm and pip leave behind, read outside of their cage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.install.content import BadContent
from runner.install.fetch import _needs_newer, _outside_system, _python_of_uv, _read_json, _Runtime

OTHER_PYTHON = "ERROR: Ignored the following versions that require a different python version:"


@pytest.mark.parametrize(
    ("lines", "newer"),
    [
        (["ERROR: Package 'x' requires a different Python: 3.11.2 not in '>=3.12,<4'"], "3.12"),
        (
            [
                f"{OTHER_PYTHON} 0.1 Requires-Python <3.9,>=3.8; 1.0 Requires-Python >=3.12; 2.0 >3.13",
                "ERROR: No matching distribution found for x",
            ],
            "3.12",
        ),
        # An older one was left behind, and the newest has no wheel.
        ([f"{OTHER_PYTHON} 1.0 Requires-Python >=3.6,<3.9"], ""),
        (["ERROR: No matching distribution found for x>=3.99"], ""),
    ],
)
def test_the_least_python_that_pip_asks_for(lines: list[str], newer: str) -> None:
    assert _needs_newer(lines, _Runtime("/usr/bin/python3.11", "3.11")) == newer


def test_pythons_that_uv_has_fetched(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert _python_of_uv("3.12", home) == ""
    for name in (
        "cpython-3.12.9-linux",
        "cpython-3.12.10-linux",
        "cpython-3.1.2-linux",
        "pypy-3.12.99-linux",
    ):
        prefix = tmp_path / ".local/share/uv/python" / name
        for path in ("bin/python3.12", "lib/python3.12/os.py"):
            (prefix / path).parent.mkdir(parents=True)
            (prefix / path).touch(0o755)
    found = _python_of_uv("3.12", home)
    assert found == f"{tmp_path}/.local/share/uv/python/cpython-3.12.10-linux/bin/python3.12"
    assert _python_of_uv("3.13", home) == _python_of_uv("3.1", home) == ""
    elsewhere = {"HOME": "/", "UV_PYTHON_INSTALL_DIR": f"{tmp_path}/.local/share/uv/python"}
    assert _python_of_uv("3.12", elsewhere) == found
    # The cage is shown its files, and those of a system are there anyway.
    prefix = Path(found).parents[1]
    assert _outside_system(found) == (f"{prefix}/bin", f"{prefix}/lib")
    assert _outside_system("/usr/local/bin/python3.12") == _outside_system("/bin/python3") == ()


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
