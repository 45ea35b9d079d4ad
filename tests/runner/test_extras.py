"""The command that installs an extra, by how the runner was installed."""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from pathlib import Path

import pytest

from runner.extras import install_command
from tests.conftest import ROOT


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment, and code that is no checkout."""
    folder = tmp_path / "an environment"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/pip").touch()
    return folder


def test_each_installation_has_its_own_command(environment: Path, tmp_path: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    serve, gateway = (" ".join(f"'{each}'" for each in extras[name]) for name in ("serve", "gateway"))
    gateway = gateway.replace("'plugin-runner[serve]'", serve)
    bare = str(tmp_path)

    def command(root: str | Path = bare, prefix: str | Path = bare, extra: str = "gateway") -> str:
        found = install_command(extra, str(root), str(prefix))
        assert "plugin-runner[" not in found  # no registry has it
        return found

    assert command(ROOT, environment) == f"'{environment}/bin/pip' install -e '{ROOT}[gateway]'"
    assert command(ROOT) == f"{sys.executable} -m pip install -e '{ROOT}[gateway]'"
    assert sorted(command(prefix=environment).split()) == sorted(
        f"'{environment}/bin/pip' install {gateway}".split()
    )
    assert command(extra="serve") == f"{sys.executable} -m pip install {serve}"
    (environment / "pipx_metadata.json").touch()
    assert command(ROOT, environment, "serve") == f"pipx inject 'an environment' {serve}"
    deb = command(prefix="/usr/lib/plugin-runner")
    assert deb == "apt-get install --reinstall ./plugin-runner_*.deb"


def test_without_metadata_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    found = install_command("serve", str(tmp_path), str(tmp_path))
    assert found.endswith(" -m pip install 'plugin-runner[serve]'")
