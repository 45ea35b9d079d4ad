"""The control plane at real sockets: packages, bindings, discovery, and who sees what."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runner.serve.control.market import open_market

DEVKIT = "/v1/plugin-packages/acme~devkit@0.1.0"


@pytest.mark.trio
async def test_a_package_is_imported_once_and_never_changes(tmp_path: Path) -> None:
    async with open_market(tmp_path) as ask:
        root = ask.market.package()
        first = await ask.import_(root, publisher="Acme")
        assert first.status == 201, first
        again = await ask.import_(root)
        assert (again.status, again.document, again.etag) == (200, first.document, first.etag)
