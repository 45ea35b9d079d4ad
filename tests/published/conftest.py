"""The installed servers, and the services that they use."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import TEMP_PREFIX
from tests.internet import Internet, internet, make_world  # noqa: F401 -- a fixture
from tests.published.install import InstallationFailed, install
from tests.published.places import copy_programs
from tests.published.services import ANSWERS, SOCKETS, databases


@pytest.fixture(scope="session")
def programs() -> Iterator[Path]:
    try:
        installed = install()
    except InstallationFailed as error:
        pytest.fail(f"the registries answer, and the servers cannot be installed:\n{error}")
    folder = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir="/tmp"))
    folder.chmod(0o755)
    try:
        copy_programs(installed, folder)
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory, templates: None) -> Iterator[Internet]:
    """The test internet, with the services that published servers use."""
    with make_world(tmp_path_factory.mktemp("internet"), ANSWERS, SOCKETS) as made:
        _vouch(made)
        yield made


def _vouch(world: Internet) -> None:
    """The machine of that internet trusts its authority: a broker reads the system's list and no other."""
    system = Path("/etc/ssl/certs/ca-certificates.crt")
    both = world.authority.with_name("ca-certificates.crt")
    both.write_bytes(system.read_bytes() + world.authority.read_bytes())
    both.chmod(0o644)
    subprocess.run([*world.entering(), "/bin/mount", "--bind", str(both), str(system)], check=True)


@pytest.fixture(scope="session")
def services(world: Internet, programs: Path) -> Iterator[Internet]:
    with databases(programs, world.authority.parent):
        yield world
