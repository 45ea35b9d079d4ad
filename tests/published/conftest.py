"""The installed servers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import TEMP_PREFIX
from tests.published.install import InstallationFailed, install
from tests.published.places import copy_programs


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
