"""Gives tests that share a module-scoped fixture to one xdist worker.

`--dist loadgroup` is meant for this, but it adds the group to the test's id, which pytest 9.2 does not allow.
So groups are found where xdist distributes tests: by name, in a process that has not imported the tests.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_TESTS = Path(__file__).resolve().parent
_ROOT = _TESTS.parent


class Spread(LoadScopeScheduling):  # type: ignore[misc,unused-ignore]
    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._groups = groups()

    def _split_scope(self, nodeid: str) -> str:
        return self._groups.get(nodeid.partition("[")[0], nodeid)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        """As xdist's, which then counts what is left in all groups a worker ever had, 13,000 times."""
        name = self.registered_collections[node][item_index]
        group = self.assigned_work[node][self._split_scope(name)]
        group[name] = True
        if all(group.values()):
            del self.assigned_work[node][self._split_scope(name)]
        self._reschedule(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return Spread(config, log) if config.getvalue("dist") == "loadgroup" else None


def groups(folder: Path = _TESTS, root: Path = _ROOT) -> Mapping[str, str]:
    """The group of each function that takes a module-scoped fixture of its file, by the function's id."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("test_*.py")):
        text = path.read_text()
        if 'scope="module"' not in text:
            continue
        functions = [
            each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        taken = {each.name: {argument.arg for argument in each.args.args} for each in functions}
        shared = {each.name for each in functions if any(map(_has_module_scope, each.decorator_list))}
        file = path.relative_to(root).as_posix()
        for name in taken:
            if used := sorted(shared & _closure(name, taken)):
                found[f"{file}::{name}"] = f"{file}::{used[0]}"
    return found


def _closure(name: str, taken: Mapping[str, set[str]]) -> set[str]:
    """The fixtures of the module that a function takes, also by way of others."""
    found: set[str] = set()
    ends = {name}
    while ends:
        ends = {fixture for each in ends for fixture in taken.get(each, ())} - found
        found |= ends
    return found


def _has_module_scope(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and any(
        keyword.arg == "scope" and isinstance(keyword.value, ast.Constant) and keyword.value.value == "module"
        for keyword in decorator.keywords
    )
