"""Many plugins of all contracts: copies of the examples, each with a name of its own."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import ROOT

# How many there are of each contract, and how often each of them is called. Calls that start a process are
# rarer, because they take longer than all others together.
SHARES = {"ainb": (3, 12), "kaged": (3, 12), "mcp": (4, 12), "nexo": (4, 12), "rune": (3, 1), "vai": (3, 1)}


class Shelved(NamedTuple):
    """A plugin of the shelf, and a call that it answers."""

    name: str
    contract: str
    tool: str
    input: Mapping[str, Any]
    weight: int


def fill_shelf(folder: Path) -> list[Shelved]:
    """Copy 20 plugins there."""
    found = []
    for contract, (count, weight) in SHARES.items():
        for number in range(count):
            name = f"{contract}{number}"
            found.append(put_example(contract, name, folder, weight))
    return found


def put_example(contract: str, name: str, shelf: Path, weight: int = 1) -> Shelved:
    """Copy the example of a contract to a folder, under another name."""
    folder = shelf / name
    try:
        return _put(contract, name, folder, weight)
    finally:
        for path in (shelf, folder, *folder.rglob("*")):
            path.chmod(0o755)


def _put(contract: str, name: str, folder: Path, weight: int) -> Shelved:
    if contract == "vai":  # the example has no hook
        _copy(ROOT / "tests/plugins/vai_devkit", folder, "acme/devkit", f"acme/{name}")
        return Shelved(f"acme.{name}", contract, "reader", {"text": "x"}, weight)
    _copy(ROOT / "runner/contracts" / contract / "example", folder, "greeter", name)
    if contract == "ainb":
        return Shelved(name, contract, name, {"argv": ["hello", "you"]}, weight)
    tool = {"kaged": "count", "nexo": f"{name}_greet"}.get(contract, "greet")
    return Shelved(name, contract, tool, {} if contract == "kaged" else {"name": "you"}, weight)


def _copy(source: Path, folder: Path, old: str, new: str) -> None:
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_text(path.read_text().replace(old, new))
    if (folder / old).is_file():  # an executable with the plugin's name
        (folder / old).rename(folder / new)
