"""The stored help of a verb: used as long as it is right, and never believed otherwise."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from runner.cli.shared import stored_help
from runner.cli.shared.stored_help import help_of
from runner.launch.stored import store
from sandbox import cache, look


class Maker:
    """Makes another text each time, and imports a module of ours for it."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> str:
        self.made += 1
        return f"usage: {self.made} \udcff\n"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source of ours that is imported, and a cache of its own."""
    path = tmp_path / "runner/verb.py"
    path.parent.mkdir()
    path.touch()
    loaded = ModuleType("runner.verb")
    loaded.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "runner.verb", loaded)
    monkeypatch.setattr(store, "CODE_ROOT", str(tmp_path))
    monkeypatch.setattr(cache, "directory", lambda: str(tmp_path / "cache"))
    monkeypatch.setattr(look, "SETTLED_SECONDS", -3600.0)
    return path


def test_it_is_made_once(module: Path) -> None:
    make = Maker()
    assert [help_of("check", 98, make) for _ in range(3)] == ["usage: 1 \udcff\n"] * 3
    [entry] = (module.parent.parent / "cache").iterdir()
    assert entry.stat().st_mode & 0o777 == 0o600


def _damage(module: Path) -> None:
    [entry] = (module.parent.parent / "cache").iterdir()
    entry.write_bytes(entry.read_bytes()[:-1])


def _share(module: Path) -> None:
    (module.parent.parent / "cache").chmod(0o777)


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.write_text("# more"),
        lambda module: module.unlink(),
        lambda module: os.utime(module, (1, 1)),
        _damage,
        _share,
    ],
    ids=["written", "removed", "older", "damaged", "others can write"],
)
def test_what_has_changed_is_made_anew(module: Path, change: Callable[[Path], object]) -> None:
    make = Maker()
    help_of("check", 98, make)
    change(module)
    assert help_of("check", 98, make) == "usage: 2 \udcff\n"


def test_it_belongs_to_one_terminal_one_verb_and_one_caller(
    module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Maker()
    help_of("check", 98, make)
    help_of("check", 78, make)
    help_of("explain", 98, make)
    for name in ("XDG_RUNTIME_DIR", "RUNNER_POLICY", "NO_COLOR", "LANGUAGE"):
        monkeypatch.setenv(name, "/other")
        help_of("check", 98, make)
    monkeypatch.setattr(stored_help, "__version__", "other")
    help_of("check", 98, make)
    assert make.made == 8


def test_a_source_of_this_moment_is_not_relied_on(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "SETTLED_SECONDS", 3600.0)
    make = Maker()
    help_of("check", 98, make)
    help_of("check", 98, make)
    assert make.made == 2


def test_nothing_is_stored_without_a_cache(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "directory", lambda: None)
    make = Maker()
    help_of("check", 98, make)
    help_of("check", 98, make)
    assert make.made == 2 and not (module.parent.parent / "cache").exists()
