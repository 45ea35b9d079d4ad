"""The storage of a kaged plugin, through the guard: who may ask, parameters, answers, errors."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runner.contracts.kaged import database, storage
from runner.contracts.kaged.declared import STORAGE_READ as READ
from runner.contracts.kaged.declared import STORAGE_WRITE as WRITE
from runner.contracts.kaged.host_methods import DELETE, GET, LIST, SET
from runner.contracts.kaged.services import PAGE_DEFAULT, PAGE_MOST, PARAMS, StorageMethods, provide
from runner.contracts.kaged.storage import KEY_MOST_BYTES, VALUE_MOST_BYTES, SqliteStore
from runner.plugin import Plugin
from runner.protocol.dialect import Answer, HostCall
from runner.protocol.host_services import Granted, HostError, Services
from runner.protocol.jsonrpc import INVALID_PARAMS, METHOD_NOT_FOUND
from runner.protocol.service_guard import CONCURRENT, WAITING, ServiceGuard
from sandbox.spec import SandboxSpec
from tests.conftest import ROOT

pytestmark = pytest.mark.trio

METHODS = (GET, SET, DELETE, LIST)
BOTH = (READ, WRITE)
GOOD = {GET: {"key": "a"}, SET: {"key": "a", "value": 1}, DELETE: {"key": "a"}, LIST: {}}


async def emit(value: Any) -> None:
    raise AssertionError("nothing comes in parts")


def plugin(capabilities: Sequence[str] = BOTH) -> Plugin:
    return Plugin(
        id="notes",
        version="1.0.0",
        contract="kaged",
        name="notes",
        description="",
        manifest="/notes/kaged-plugin.yaml",
        root="/notes",
        entrypoint=None,
        spec=SandboxSpec(),
        capabilities=tuple(capabilities),
    )


def guard(
    state_dir: Path | None,
    capabilities: Sequence[str] = BOTH,
    allowed: Sequence[str] = ("kaged.storage.*",),
    services: Services | None = None,
) -> ServiceGuard:
    """As a session makes it."""
    provided = provide(
        plugin(capabilities), services or Services(), None if state_dir is None else str(state_dir)
    )
    return ServiceGuard(StorageMethods(capabilities), provided, allowed, plugin(capabilities))


async def ask(at: ServiceGuard, method: str, params: Any) -> Answer:
    return await at.answer(HostCall(1, method, params), emit)


# --- who may ask --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
async def test_with_everything_allowed_it_is_served(tmp_path: Path, method: str) -> None:
    assert (await ask(guard(tmp_path), method, GOOD[method])).error is None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("held", [(), (READ,), (WRITE,), BOTH])
async def test_each_method_needs_its_capability(tmp_path: Path, method: str, held: Sequence[str]) -> None:
    needed = READ if method in (GET, LIST) else WRITE
    error = (await ask(guard(tmp_path, held), method, GOOD[method])).error
    if needed in held:
        assert error is None
    else:
        assert error is not None and error[:2] == (-32001, "capability_denied")
        assert error[2] == {
            "capability": needed,
            "reason": f"the manifest does not declare {needed} under capabilities",
        }
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("allowed", [(), ("broker.*", "memory.*", "llm.*"), ("kaged.storage",)])
async def test_the_policy_has_to_allow_it(tmp_path: Path, method: str, allowed: Sequence[str]) -> None:
    error = (await ask(guard(tmp_path, allowed=allowed), method, GOOD[method])).error
    assert error is not None and error[:2] == (-32001, "capability_denied")
    assert error[2]["policy"] == "capabilities.host" and method in error[2]["reason"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("allowed", "method", "served"),
    [
        (("kaged.storage.get",), GET, True),
        (("kaged.storage.get",), SET, False),
        (("kaged.*",), SET, True),
        (("*",), LIST, True),
    ],
)
async def test_the_policy_names_methods(
    tmp_path: Path, allowed: Sequence[str], method: str, served: bool
) -> None:
    answer = await ask(guard(tmp_path, allowed=allowed), method, GOOD[method])
    assert (answer.error is None) is served


@pytest.mark.parametrize("method", METHODS)
async def test_without_a_state_directory_there_is_no_such_method(method: str) -> None:
    error = (await ask(guard(None), method, GOOD[method])).error
    assert error == (
        -32601,
        f"method not found: {method}",
        {"reason": "there is no storage: the plugin has no state directory"},
    )


async def test_other_methods_are_unknown(tmp_path: Path) -> None:
    for method in ("kaged.storage.rename", "kaged.secrets.get", "memory.recall", "x\ny"):
        error = (await ask(guard(tmp_path), method, {})).error
        assert error is not None and error[0] == -32601 and "\n" not in error[1]


async def test_too_many_at_once_are_busy(tmp_path: Path) -> None:
    full = guard(tmp_path)
    full._open = CONCURRENT + WAITING
    error = (await ask(full, GET, GOOD[GET])).error
    assert error is not None and error[:2] == (-32003, "busy")


@pytest.mark.parametrize(
    ("capabilities", "allowed", "place", "offered"),
    [
        (BOTH, ("kaged.storage.*",), True, True),
        ((READ,), ("kaged.storage.get",), True, True),
        ((READ,), ("broker.*",), True, False),
        ((), ("*",), True, False),
        (("net:[]",), ("*",), True, False),
        (BOTH, ("*",), False, False),
    ],
)
async def test_storage_is_offered_only_if_it_can_be_used(
    tmp_path: Path, capabilities: Sequence[str], allowed: Sequence[str], place: bool, offered: bool
) -> None:
    at = guard(tmp_path if place else None, capabilities, allowed)
    assert ("storage" in at.offered) is offered


# --- a host's own store -------------------------------------------------------------------------------------


class Shelf:
    """A library user's store."""

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}

    async def get(self, key: str) -> Any:
        return self.entries[key]

    async def set(self, key: str, value: Any) -> None:
        if key == "no":
            raise HostError(-32099, "not today")
        self.entries[key] = value
        self.writer = Granted.current().plugin.id

    async def delete(self, key: str) -> bool:
        return self.entries.pop(key, None) is not None

    async def list(self, prefix: str, after: str, limit: int) -> Sequence[str]:
        return [key for key in sorted(self.entries) if key.startswith(prefix) and key > after][:limit]


async def test_a_store_of_the_hosts_own_is_used(tmp_path: Path) -> None:
    shelf = Shelf()
    at = guard(tmp_path, services=Services(storage=shelf))
    assert await ask(at, SET, {"key": "a", "value": [1]}) == Answer({})
    assert shelf.entries == {"a": [1]} and shelf.writer == "notes"
    assert await ask(at, GET, {"key": "a"}) == Answer({"value": [1], "found": True})
    assert await ask(at, GET, {"key": "b"}) == Answer({"value": None, "found": False})
    assert await ask(at, SET, {"key": "no", "value": 1}) == Answer(error=(-32099, "not today", None))
    assert os.listdir(tmp_path) == []


async def test_a_store_of_the_hosts_own_needs_no_state_directory() -> None:
    at = guard(None, services=Services(storage=Shelf()))
    assert "storage" in at.offered
    assert await ask(at, SET, {"key": "a", "value": 1}) == Answer({})


async def test_a_store_of_the_hosts_own_is_not_for_plugins_without_the_capability() -> None:
    at = guard(None, (), services=Services(storage=Shelf()))
    error = (await ask(at, GET, {"key": "a"})).error
    assert error is not None and error[0] == -32001
    assert at.offered == frozenset()
    shelf = Shelf()
    reader = guard(None, (READ,), services=Services(storage=shelf))
    error = (await ask(reader, SET, {"key": "a", "value": 1})).error
    assert error is not None and error[0] == -32001 and shelf.entries == {}


# --- parameters ---------------------------------------------------------------------------------------------

LONGEST = "é" * (KEY_MOST_BYTES // 2)


@pytest.mark.parametrize(
    ("method", "params", "reason"),
    [
        (GET, [], "they must be an object"),
        (GET, "a", "they must be an object"),
        (GET, None, "key is missing"),
        (GET, {}, "key is missing"),
        (GET, {"key": "a", "kee": 1}, "there is no parameter 'kee'; known are key"),
        (GET, {"key": None}, "key must be a string"),
        (GET, {"key": 1}, "key must be a string"),
        (GET, {"key": ""}, "key must not be empty"),
        (GET, {"key": "a\nb"}, "key must not contain control characters"),
        (GET, {"key": "\x00"}, "key must not contain control characters"),
        (GET, {"key": "\x85"}, "key must not contain control characters"),
        (GET, {"key": "\ud800"}, "key must be Unicode text: it has half of a surrogate pair"),
        (GET, {"key": "s\ufffd"}, "key must not contain U+FFFD, which stands for text that is not Unicode"),
        (GET, {"key": LONGEST + "x"}, "key has 257 bytes in UTF-8, and the most is 256"),
        (DELETE, {"key": ""}, "key must not be empty"),
        (SET, {"key": "a"}, "value is missing"),
        (SET, {"value": 1}, "key is missing"),
        (SET, {"key": "", "value": 1}, "key must not be empty"),
        (
            SET,
            {"key": "a", "value": "x" * (VALUE_MOST_BYTES - 1)},
            "value has 262145 bytes as JSON, and the most is 262144",
        ),
        (
            SET,
            {"key": "a", "value": float("nan")},
            "value is Out of range float values are not JSON compliant",
        ),
        (LIST, {"prefix": 1}, "prefix must be a string"),
        (LIST, {"after": LONGEST + "x"}, "after has 257 bytes in UTF-8, and the most is 256"),
        (LIST, {"limit": 0}, f"limit must be an integer from 1 to {PAGE_MOST}"),
        (LIST, {"limit": True}, f"limit must be an integer from 1 to {PAGE_MOST}"),
        (LIST, {"limit": 2.0}, f"limit must be an integer from 1 to {PAGE_MOST}"),
        (LIST, {"limit": None}, f"limit must be an integer from 1 to {PAGE_MOST}"),
        (LIST, {"limit": PAGE_MOST + 1}, f"limit must be an integer from 1 to {PAGE_MOST}"),
        (LIST, {"key": "a"}, "there is no parameter 'key'; known are prefix, after, limit"),
    ],
)
async def test_wrong_parameters(tmp_path: Path, method: str, params: Any, reason: str) -> None:
    error = (await ask(guard(tmp_path), method, params)).error
    assert error is not None and (error[0], error[2]) == (-32602, None)
    assert error[1].startswith(f"invalid params: {reason}")


@pytest.mark.parametrize(
    ("method", "params"),
    [
        (SET, {"key": LONGEST, "value": None}),
        (SET, {"key": " ", "value": {}}),
        (SET, {"key": "a", "value": "x" * (VALUE_MOST_BYTES - 2)}),
        (LIST, None),
        (LIST, {"prefix": "", "after": "", "limit": PAGE_MOST}),
    ],
)
async def test_parameters_that_are_just_right(tmp_path: Path, method: str, params: Any) -> None:
    assert (await ask(guard(tmp_path), method, params)).error is None


# --- answers ------------------------------------------------------------------------------------------------


async def test_the_answers(tmp_path: Path) -> None:
    at = guard(tmp_path)
    for method, params, result in (
        (GET, {"key": "a"}, {"value": None, "found": False}),
        (DELETE, {"key": "a"}, {"deleted": False}),
        (LIST, {}, {"keys": [], "more": False}),
        (SET, {"key": "a", "value": None}, {}),
        (GET, {"key": "a"}, {"value": None, "found": True}),
        (SET, {"key": "a", "value": {"n": [1, 2.5, "é", "\u0000"]}}, {}),
        (GET, {"key": "a"}, {"value": {"n": [1, 2.5, "é", "\u0000"]}, "found": True}),
        (SET, {"key": "b/1", "value": 1}, {}),
        (SET, {"key": "b/2", "value": 2}, {}),
        (SET, {"key": "c", "value": 3}, {}),
        (LIST, {}, {"keys": ["a", "b/1", "b/2", "c"], "more": False}),
        (LIST, {"limit": 3}, {"keys": ["a", "b/1", "b/2"], "more": True}),
        (LIST, {"limit": 3, "after": "b/2"}, {"keys": ["c"], "more": False}),
        (LIST, {"prefix": "b/"}, {"keys": ["b/1", "b/2"], "more": False}),
        (LIST, {"prefix": "b/", "limit": 1}, {"keys": ["b/1"], "more": True}),
        (LIST, {"prefix": "b/", "after": "b/1"}, {"keys": ["b/2"], "more": False}),
        (LIST, {"prefix": "b/", "after": "c"}, {"keys": [], "more": False}),
        (DELETE, {"key": "a"}, {"deleted": True}),
        (GET, {"key": "a"}, {"value": None, "found": False}),
    ):
        assert await ask(at, method, params) == Answer(result), (method, params)
    assert await SqliteStore(str(tmp_path)).get("c") == 3


# --- the page about it --------------------------------------------------------------------------------------

PAGE = (ROOT / "docs/kaged.md").read_text()


def _rows(heading: str) -> dict[str, str]:
    """The first cell of each row of a table -> the rest of the row."""
    table = PAGE.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return {row.split("|")[1].strip(" `"): row for row in table}


async def test_the_page_has_every_method_and_its_params() -> None:
    rows = _rows("request")
    assert set(rows) == set(PARAMS)
    for method, params in PARAMS.items():
        assert set(params) <= set(re.findall(r"`(\w+)`", rows[method].split("|")[2]))
    assert f"1 to {PAGE_MOST}, default {PAGE_DEFAULT}" in rows[LIST]


async def test_the_page_has_every_error() -> None:
    codes = (METHOD_NOT_FOUND, INVALID_PARAMS, storage.DENIED, storage.FULL, storage.BUSY, storage.UNUSABLE)
    assert set(_rows("error")) == {str(code) for code in codes}
    assert f"for {storage.BUSY_SECONDS:g} seconds" in _rows("error")[str(storage.BUSY)]


async def test_the_page_has_every_limit() -> None:
    rows = _rows("limit")
    assert f"1 to {storage.KEY_MOST_BYTES} bytes" in rows["a key"]
    assert f" {storage.VALUE_MOST_BYTES} bytes" in rows["a value"]
    assert f" {storage.ENTRIES_MOST_BYTES} bytes" in rows["all entries"]
    assert f"and {storage.ENTRY_EXTRA_BYTES} bytes" in rows["all entries"]
    assert f" {storage.KEYS_MOST} " in rows["keys"]
    assert f" {database.FILE_MOST_BYTES} bytes" in rows["the file"]
