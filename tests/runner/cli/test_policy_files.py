"""`runner check POLICY` and `runner schema policy`; the policies of docs/policy.md are sound."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from runner.cli.shared.policy_file import is_policy
from sandbox.policy.parse import parse_policy
from sandbox.policy.tables import policy_schema
from tests.conftest import ROOT, Caller
from tests.tables import one_case

Write = Callable[..., Path]
PAGE = (ROOT / "docs/policy.md").read_text()
RECIPES = re.findall(r"^### (\d+\. .*?)\n.*?^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SHIPPED = sorted((ROOT / "policies").glob("*.toml"))


def test_there_are_ten_recipes_and_no_other_policy_on_the_page() -> None:
    assert len(RECIPES) == 10 == PAGE.count("```toml\n")


@one_case(("title", "text"), RECIPES, ids=[title for title, _ in RECIPES])
def test_a_recipe_is_sound(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write, title: str, text: str
) -> None:
    policy = write_file(plugin_dir / "recipe.toml", text)
    said = runner_as_user("check", policy)
    assert (said.returncode, said.stdout, said.stderr) == (0, f"{policy}: ok: a policy\n", "")
    assert jsonschema_rs.is_valid(policy_schema(), tomllib.loads(text))


@one_case("path", SHIPPED, ids=lambda path: path.name)
def test_the_shipped_ones_are_sound(runner_as_user: Caller, path: Path) -> None:
    said = runner_as_user("check", path)
    assert said.returncode == 0 and said.stdout.startswith(f"{path}: ok: a policy\n")
    assert jsonschema_rs.is_valid(policy_schema(), tomllib.loads(path.read_text()))


FAULTY = """\
version = 1
unsandbxed = "deny"
[network]
ceiling = "everything"
[approvals]
read = ["relative"]
"""


def test_every_fault_has_its_place(runner_as_user: Caller, plugin_dir: Path, write_file: Write) -> None:
    policy = write_file(plugin_dir / "own.toml", FAULTY)
    said = runner_as_user("check", policy)
    assert said.returncode == 26
    places = [line.split(": ")[:3] for line in said.stdout.splitlines() if line.startswith(str(policy))]
    assert [(place.removeprefix(f"{policy}:"), rule) for place, _, rule in places] == [
        ("2:1", "policy_unknown_key"),
        ("4:1", "policy_value"),
        ("6:9", "policy_value"),
    ]
    assert said.stdout.endswith("3 errors, 0 warnings\n")
    document = json.loads(runner_as_user("check", "--format", "json", policy).stdout)
    assert (document["ok"], document["errors"]) == (False, 3)
    assert not jsonschema_rs.is_valid(policy_schema(), tomllib.loads(FAULTY))


def test_a_policy_with_a_syntax_error_is_one_by_its_name(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    policy = write_file(plugin_dir / "policy.toml", "version = \n")
    said = runner_as_user("check", policy)
    assert said.returncode == 26 and f"{policy}:1:" in said.stdout


def test_a_policy_that_a_launch_would_not_trust_is_pointed_out(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    policy = write_file(plugin_dir / "policy.toml", "version = 1\n", 0o666)
    said = runner_as_user("check", policy)
    assert said.returncode == 0
    assert "warning: policy_untrusted" in said.stdout and f"chmod go-w {policy}" in said.stdout


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nexo-plugin.toml", "version = 1\n[network]\n"),  # a contract's own name
        ("other.toml", "[plugin]\nid = 'x'\n"),
        ("other.toml", "version = 2\n[network]\n"),
        ("other.toml", "[env]\nNAME = 'x'\nname = 'y'\n"),
        ("other.toml", "ceiling = 'none'\n"),
        ("other.toml", "[deny]\n"),
        ("other.toml", "version = 1\n[plugin]\n[tool]\n[network]\n"),
        ("other.json", "version = 1\n[network]\n"),
    ],
)
def test_other_files_are_no_policy(plugin_dir: Path, write_file: Write, name: str, text: str) -> None:
    assert not is_policy(str(write_file(plugin_dir / name, text)))


def test_the_schema_is_printed(runner_as_user: Caller) -> None:
    said = runner_as_user("schema", "policy")
    assert (said.returncode, json.loads(said.stdout)) == (0, policy_schema())


def _tables(schema: dict[str, Any], at: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    found = [(at, schema)]
    for key, each in schema["properties"].items():
        if each.get("additionalProperties") is False:
            found += _tables(each, (*at, key))
    return found


@pytest.mark.parametrize(
    ("at", "table"), _tables(policy_schema()), ids=lambda value: ".".join(value) or "top"
)
def test_the_schema_has_the_keys_that_the_parser_knows(at: tuple[str, ...], table: dict[str, Any]) -> None:
    """The parser names all keys of a table if it meets one that is too far from all of them."""
    text = "version = 1\n" + (f"[{'.'.join(at)}]\n" if at else "") + "qqqqqqqqqqqq = 1\n"
    with pytest.raises(Exception) as refused:  # noqa: PT011 -- the diagnostics are what counts
        parse_policy("/policy.toml", text.encode(), name="p")
    [fault] = refused.value.diagnostics  # type: ignore[attr-defined]
    assert set(re.findall(r"[a-z_]+", fault.hint)) >= set(table["properties"])
