"""One docker-registry for all tests of a process: it takes a moment to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runner.oci.servers import FakeRegistry, docker_registry, fake_registry


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT. Every test has repositories of its own."""
    with docker_registry(tmp_path_factory.mktemp("registry")) as address:
        yield address


@pytest.fixture
def server() -> Iterator[FakeRegistry]:
    with fake_registry() as made:
        yield made


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not those of the person who runs the tests."""
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "DOCKER_CONFIG"):
        monkeypatch.setenv(name, str(tmp_path / "nobody"))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
