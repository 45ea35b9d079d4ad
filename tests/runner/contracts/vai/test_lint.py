"""Each rule of the linter: a package that breaks it, and the sound one that breaks none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from runner.contracts.registry import example_folder
from runner.contracts.vai.package.lint import lint
from runner.manifest.load import load
from sandbox.document.diagnostic import Diagnostic
from sandbox.document.read import parse

PERMISSIONS = '[exports.permissions]\nnetwork = "none"\nfilesystem = "none"\n'


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "package"
    shutil.copytree(example_folder("vai"), folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def linted(folder: Path) -> tuple[Diagnostic, ...]:
    path = folder / "vai-plugin.toml"
    read = load(str(folder))
    assert read.plugin is not None, [d.text() for d in read.diagnostics]
    return lint(parse(str(path), path.read_bytes(), "toml"), read.plugin)


def rules(folder: Path) -> list[str]:
    found = linted(folder)
    assert all(d.severity == "warning" and d.hint and d.message for d in found)
    return [d.rule for d in found]


def change(folder: Path, old: str, new: str) -> int:
    """The line of the change."""
    path = folder / "vai-plugin.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return text.partition(old)[0].count("\n") + 1


def test_the_example_breaks_no_rule(package: Path) -> None:
    assert linted(package) == ()


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ('network = "none"', 'gateway_api_scopes = ["runs:read"]', "scopes_offline"),
        ('network = "none"', 'network = "egress"\ngateway_api_scopes = ["*"]', "scope_wildcard"),
        ('network = "none"', 'network = "egress"\ngateway_api_scopes = ["runs:*"]', "scope_wildcard"),
        ('network = "none"', 'network = "egress"\ngateway_api_scopes = ["everything"]', "scope_form"),
        ('network = "none"', 'network = "egress"\ngateway_api_scopes = ["runs:write"]', "scope_write"),
        ('network = "none"', 'secret_slots = ["token"]', "slots_offline"),
        ("default_timeout_ms = 20000", 'execution_class = "inline"', "class_inline"),
        ('effect_class = "read_only"\n', "", "effect_unknown"),
        ('output_schema = "schemas/greet_output.json"\n', "", "output_schema_missing"),
        ('config_schema = "schemas/greet_config.json"\n', "", "config_schema_missing"),
        ('description = "Greets somebody by name."\n', "", "description_missing"),
        ('description = "Greets people."\n', "", "description_missing"),
        ('license = "Apache-2.0"\n', "", "license_missing"),
        ('filesystem = "none"', 'filesystem = "assets_ro"', "assets_missing"),
    ],
)
def test_a_manifest_that_is_unwise(package: Path, old: str, new: str, rule: str) -> None:
    change(package, old, new)
    found = [name for name in rules(package) if name != "schema_unused"]
    assert found == [rule]


@pytest.mark.parametrize("scope", ["runs:read", "runs:list"])
def test_scopes_that_only_read_fit_a_tool_that_only_reads(package: Path, scope: str) -> None:
    change(package, 'network = "none"', f'network = "egress"\ngateway_api_scopes = ["{scope}"]')
    assert linted(package) == ()


def test_write_scopes_fit_a_tool_that_writes(package: Path) -> None:
    change(package, 'network = "none"', 'network = "egress"\ngateway_api_scopes = ["runs:write"]')
    change(package, '"read_only"', '"idempotent_write"')
    assert linted(package) == ()


def test_a_place_in_the_manifest(package: Path) -> None:
    line = change(package, 'network = "none"', 'secret_slots = ["token"]')
    [found] = linted(package)
    assert (found.line, found.column) == (line, 1)
    assert found.file == str(package / "vai-plugin.toml")


def test_scratch_costs_the_reuse_of_processes(package: Path) -> None:
    change(package, 'filesystem = "none"', 'filesystem = "scratch"')
    assert rules(package) == []  # a tool is isolated anyway
    change(package, "default_timeout_ms", 'execution_class = "worker"\ndefault_timeout_ms')
    assert rules(package) == ["scratch_reuse"]


def test_a_harness_without_scopes(package: Path) -> None:
    text = (package / "vai-plugin.toml").read_text()
    harness = '[exports.harness]\nmode = "composite"\nfidelity = "lossless"\nsupports = []\n'
    changed = text.partition("[exports.tool]")[0].replace('kind = "tool"', 'kind = "harness"') + harness
    (package / "vai-plugin.toml").write_text(changed)
    assert "scopes_missing" in rules(package)


def test_a_schema_that_nobody_names(package: Path) -> None:
    (package / "schemas/old.json").write_text("{}")
    (package / "schemas/notes.md").write_text("")  # no schema
    [found] = linted(package)
    assert (found.rule, os.path.basename(found.file), found.line) == ("schema_unused", "old.json", 0)


def test_a_schema_in_another_place(package: Path) -> None:
    (package / "bin/out.json").write_text("{}")
    change(package, "schemas/greet_output.json", "bin/out.json")
    assert rules(package) == ["schema_unused", "schema_place"]


def test_a_program_outside_of_bin(package: Path) -> None:
    (package / "plugin").write_text("#!/bin/sh\n")
    change(package, "./bin/plugin", "./plugin")
    assert rules(package) == ["program_place"]


def test_no_readme(package: Path) -> None:
    (package / "README.md").rename(package / "readme.txt")
    assert rules(package) == []
    (package / "readme.txt").unlink()
    assert rules(package) == ["readme_missing"]


def test_assets_that_no_export_can_read(package: Path) -> None:
    (package / "assets").mkdir()
    assert rules(package) == ["assets_unused"]
    change(package, 'filesystem = "none"', 'filesystem = "assets_ro"')
    assert rules(package) == []


def test_parts_that_the_cage_does_not_show(package: Path) -> None:
    (package / "lib").mkdir()
    for name in ("LICENSE", "CHANGELOG.md", "marketplace.signature.json", ".gitignore"):
        (package / name).write_text("")
    [found] = linted(package)
    assert (found.rule, found.file) == ("part_hidden", str(package / "lib"))


@pytest.mark.parametrize("name", ["bin/id_rsa", "bin/Server.PEM", "schemas/.env", "bin/.env.local"])
def test_files_that_hold_secrets(package: Path, name: str) -> None:
    (package / name).write_text("")
    [found] = linted(package)
    assert (found.rule, found.file) == ("secret_file", str(package / name))
