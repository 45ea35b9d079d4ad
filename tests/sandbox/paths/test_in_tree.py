"""Paths in the tree of an image: links lead to files of the tree, and nothing is mounted through one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox.paths.in_tree import TreeObstacle, find_in_tree, find_obstacle
from tests.tables import check_rows


@pytest.fixture
def tree(tmp_path: Path) -> str:
    tree = tmp_path / "tree"
    for folder in ("etc", "usr/bin", "usr/lib"):
        (tree / folder).mkdir(parents=True)
    (tree / "etc/passwd").write_text("of the image")
    (tmp_path / "outside").write_text("of the host")
    links = {
        "bin": "usr/bin",
        "usr/bin/up": "../lib",
        "absolute": "/usr/lib",
        "out": "../../../../../../etc/passwd",
        "host": str(tmp_path / "outside"),
        "a": "b",
        "b": "a",
        "etc/shadow": "/nowhere",
    }
    for name, target in links.items():
        os.symlink(target, tree / name)
    return str(tree)


def test_links_lead_to_files_of_the_tree(tree: str) -> None:
    rows = {
        "/": "/",
        "/bin": "/usr/bin",
        "/bin/up": "/usr/lib",
        "/absolute": "/usr/lib",
        "/../../etc": "/etc",
        "/out": "/etc/passwd",
        "/host": None,
        "/a": None,
        "/etc/shadow": None,
        "/etc/passwd/x": None,
    }

    def leads(path: str, wanted: str | None) -> None:
        found = find_in_tree(tree, path)
        assert (None if found is None else found.path) == wanted

    check_rows(rows, leads)


def test_nothing_is_mounted_through_a_link(tree: str) -> None:
    rows = {
        ("/etc", True): None,
        ("/new/deep", True): None,
        ("/etc/new", False): None,
        ("/etc/passwd", False): None,
        ("/bin", True): TreeObstacle("/bin", "link", "usr/bin"),
        ("/bin/x", False): TreeObstacle("/bin", "link", "usr/bin"),
        ("/etc/shadow", False): TreeObstacle("/etc/shadow", "link", "/nowhere"),
        ("/etc/passwd", True): TreeObstacle("/etc/passwd", "file"),
        ("/etc/passwd/x", False): TreeObstacle("/etc/passwd", "file"),
        ("/etc", False): TreeObstacle("/etc", "folder"),
    }

    def is_found(row: tuple[str, bool], wanted: TreeObstacle | None) -> None:
        assert find_obstacle(tree, row[0], is_folder=row[1]) == wanted

    check_rows(rows.items(), is_found)
