"""The store of imported packages, where it is by default: what is in it can be started, and only that."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from runner.package.fault import PackageFault
from runner.serve.control.store import PackageFolder
from sandbox.identity.state import IMPORTED, state_root
from tests.conftest import ROOT, Caller


@pytest.mark.needs("root")
def test_an_imported_package_is_started_from_the_store(
    runner_as_root: Caller, plugin_dir: Path, nothing_left: None
) -> None:
    root = plugin_dir / "devkit"
    shutil.copytree(ROOT / "tests/plugins/vai_devkit", root)
    for path in (root, *root.rglob("*")):
        path.chmod(0o755)
    store = os.path.join(os.path.dirname(state_root({})), IMPORTED)
    existed = os.path.isdir(store)
    found = PackageFolder(store).add(str(root))
    try:
        assert os.stat(store).st_mode & 0o777 == 0o711
        done = runner_as_root("call", found.folder, "reader", "--input", '{"n": 1}')
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["structured_output"]["body"]["input"] == {"n": 1}
    finally:
        shutil.rmtree(os.path.dirname(found.folder))
        if not existed:
            os.rmdir(store)


def test_copies_are_complete_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    root = tmp_path / "devkit"
    shutil.copytree(ROOT / "tests/plugins/vai_devkit", root)
    store = PackageFolder(str(tmp_path / "store"))
    first = store.add(str(root))
    assert store.add(str(root)) == first
    (root / "marketplace.signature.json").write_text("{}")
    signed = store.add(str(root))
    assert (signed.listing, signed.signature) == (first.listing, "{}") and signed.folder != first.folder
    # Nothing is left of one that cannot be copied.
    before = sorted(os.listdir(tmp_path / "store"))
    (root / "marketplace.signature.json").write_bytes(b"\xff")
    with pytest.raises(PackageFault, match="UTF-8"):
        store.add(str(root))
    os.mkfifo(root / "fifo")
    with pytest.raises(PackageFault, match="FIFO"):
        store.add(str(root))
    assert sorted(os.listdir(tmp_path / "store")) == before
    # What an interrupted import left goes, and what a package has stays; so does what is none of ours.
    (tmp_path / f"store/new.{'0' * 32}/package").mkdir(parents=True)
    (tmp_path / "store/oci").mkdir()
    store.sweep({first.folder})
    assert {*os.listdir(tmp_path / "store")} == {Path(first.folder).parent.name, "oci"}
    # Another user's folder is not used.
    (tmp_path / "store").chmod(0o777)
    with pytest.raises(PackageFault, match="can be changed by others"):
        store.add(str(root))
