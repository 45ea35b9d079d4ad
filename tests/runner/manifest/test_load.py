"""Finding manifests by name, by content and in directories, and the messages when none is found."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from runner.contracts.registry import all_contracts, example_folder, find_contract
from runner.manifest import load as manifest
from runner.manifest.load import ManifestRead, contract_at, find, load, load_all, servers_at
from runner.serve.sources import scan
from sandbox.document.diagnostic import DocumentError
from tests.conftest import Caller
from tests.manifests import nexo, rune

NEXO = nexo("demo")
RUNE = json.dumps(rune("demo", "a", "x"))
MCP = json.dumps({"mcpServers": {"time": {"command": "x"}}})
TEXTS = {"nexo": NEXO, "rune": RUNE, "mcp": MCP}


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_CACHE", "off")


def contract_of(loaded: ManifestRead) -> str:
    assert loaded.plugin is not None, [d.text() for d in loaded.diagnostics]
    return loaded.plugin.contract


def rules(loaded: ManifestRead) -> list[str]:
    assert loaded.plugin is None
    return [d.rule for d in loaded.diagnostics if d.severity == "error"]


NAMES = [
    ("plugin.toml", "nexo"),
    ("nexo-plugin.toml", "nexo"),
    ("rterm-plugin.json", "rune"),
    ("mcp.json", "mcp"),
    (".mcp.json", "mcp"),
    ("claude_desktop_config.json", "mcp"),
]


@pytest.mark.parametrize(("name", "contract"), NAMES)
def test_by_name_as_a_file_and_in_a_directory(tmp_path: Path, name: str, contract: str) -> None:
    (tmp_path / name).write_text(TEXTS[contract])
    assert contract_of(load(str(tmp_path / name))) == contract
    found = load(str(tmp_path))
    assert contract_of(found) == contract
    assert found.plugin is not None and found.plugin.manifest == str(tmp_path / name)


@pytest.mark.parametrize("name", ["with-suffix.toml", "without", "x.conf"])
@pytest.mark.parametrize("contract", TEXTS)
def test_by_content_if_the_name_is_unknown(tmp_path: Path, name: str, contract: str) -> None:
    if name.endswith((".toml", ".json")):
        name = f"anything.{'toml' if contract == 'nexo' else 'json'}"
    (tmp_path / name).write_text(TEXTS[contract])
    assert contract_of(load(str(tmp_path / name))) == contract


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugin.toml").write_text(NEXO)
    monkeypatch.chdir(tmp_path)
    for path in ("plugin.toml", ".", "./plugin.toml"):
        found = load(path).plugin
        assert found is not None and found.manifest == str(tmp_path / "plugin.toml")
        assert found.root == str(tmp_path)


def test_of_two_names_of_a_contract_the_first_wins_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "plugin.toml").write_text(NEXO)
    (tmp_path / "nexo-plugin.toml").write_text("nonsense")
    found = load(str(tmp_path))
    assert found.plugin is not None and found.plugin.manifest.endswith("/plugin.toml")
    [warning] = found.diagnostics
    assert warning.rule == "manifest_shadowed" and warning.severity == "warning"
    assert warning.file.endswith("/nexo-plugin.toml") and "plugin.toml" in warning.message


def test_manifests_of_several_contracts_need_a_choice(tmp_path: Path) -> None:
    (tmp_path / "plugin.toml").write_text(NEXO)
    (tmp_path / "mcp.json").write_text(MCP)
    found = load(str(tmp_path))
    assert rules(found) == ["manifest_ambiguous"]
    [diagnostic] = found.diagnostics
    assert "plugin.toml (nexo)" in diagnostic.message and "mcp.json (mcp)" in diagnostic.message
    assert "--contract" in diagnostic.hint
    assert contract_of(load(str(tmp_path), contract="mcp")) == "mcp"
    assert contract_of(load(str(tmp_path), contract="nexo")) == "nexo"


BOTH = """\
[plugin]
id = "demo"
name = "demo"
version = "1.0.0"
description = "d"
abi_version = 2
min_nexo_version = ">=0.1.0"
"""
AINB = '[plugin]\nname = "demo"\nversion = "1.0.0"\nabi_version = 2\n'
KAGED = "kaged_api: '1'\nname: demo\n"
VAI = 'api_version = "vai.plugin.v1"\n'
# The name of the file, its text, and who reads it: (contract) or the contracts that it could be of.
DECIDED = [
    ("manifest.toml", NEXO, "nexo"),  # the content decides
    ("manifest.toml", AINB, "ainb"),
    ("manifest.toml", VAI, "vai"),
    ("vai-plugin.toml", NEXO, "nexo"),
    ("plugin.toml", AINB, "ainb"),
    ("rterm-plugin.json", MCP, "mcp"),
    ("mcp.json", RUNE, "rune"),
    (".cursor/mcp.json", RUNE, "rune"),
    ("manifest.yaml", "mcpServers:\n- name: a\n  command: x\n", "mcp"),
    ("kaged-plugin.yaml", KAGED, "kaged"),
    ("manifest.toml", '[plugin]\nname = "x"\nversion = "1.0.0"\n', "ainb"),  # it tells nothing: the name does
    ("plugin.toml", '[plugin]\nname = "x"\nversion = "1.0.0"\n', "nexo"),
    ("vai-plugin.toml", "", "vai"),
    ("manifest.yaml", "name: x\n", "kaged"),
    ("rterm-plugin.json", "{}", "rune"),
    ("mcp.json", "{} // nothing yet\n", "mcp"),
    (".vscode/mcp.json", "{}", "mcp"),  # and the folder, where the name tells nothing
    (".codex/config.toml", "", "mcp"),
    ("manifest.toml", BOTH, "ainb or nexo"),  # it fits several, whatever the name is
    ("plugin.toml", BOTH, "ainb or nexo"),
    ("x.toml", BOTH, "ainb or nexo"),
    ("mcp.json", json.dumps({**json.loads(RUNE), **json.loads(MCP)}), "mcp or rune"),
    ("x.toml", '[plugin]\nname = "x"\n', ""),  # neither tells
]


def test_the_content_decides_the_contract_and_the_name_where_the_content_does_not(tmp_path: Path) -> None:
    """Every way to read a manifest gives the same answer, also for a folder, and with the contract chosen."""
    for at, (name, text, expected) in enumerate(DECIDED):
        path = tmp_path / str(at) / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        given = [str(path)]
        if path.name in (each for contract in all_contracts() for each in contract.file_names):
            given.append(str(path.parent))
        for each in given:
            loaded, [checked] = load(each), load_all(each)
            assert {one.rule for one in loaded.diagnostics} <= {one.rule for one in checked.diagnostics}
            if " or " not in expected and expected:
                assert contract_at(each) == expected, (name, text)
                if loaded.plugin is not None:
                    assert contract_of(loaded) == expected
                assert find_contract(expected).configurations is None or servers_at(each) == _servers(text)
                continue
            assert contract_at(each) is None and servers_at(each) == ()
            [refused] = loaded.diagnostics
            assert refused.rule == ("manifest_ambiguous" if expected else "manifest_unknown"), (name, text)
            assert not expected or f"a manifest of {expected}" in refused.message
            for contract in filter(None, expected.split(" or ")):
                assert f"--contract {contract}" in refused.hint
                assert contract_at(each, contract) == contract
                chosen = load(each, contract=contract)
                assert "manifest_missing" not in [one.rule for one in chosen.diagnostics], (name, contract)


def test_the_verbs_and_the_daemon_agree(runner_as: Caller, plugin_dir: Path) -> None:
    """`runner exec manifest.toml`, where that is another contract's name."""
    shutil.copytree(example_folder("nexo"), plugin_dir / "it", ignore=shutil.ignore_patterns("__pycache__"))
    folder = plugin_dir / "it"
    folder.chmod(0o755)
    (folder / "plugin.toml").rename(folder / "manifest.toml")
    plugin = load(str(folder)).plugin
    assert plugin is not None and plugin.contract == "nexo"
    call = find_contract("nexo").example
    initialize = '{"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}\n'
    rows = (
        (("check", "manifest.toml"), f"ok: {plugin.id} {plugin.version} (nexo)"),
        (("check", "."), f"ok: {plugin.id} {plugin.version} (nexo)"),
        (("explain", "manifest.toml"), f"{plugin.id} {plugin.version} (nexo)"),
        (("exec", "manifest.toml"), '"result"'),
        (("call", "manifest.toml", call.call, "--input", call.input), "Hello"),
    )
    for words, expected in rows:
        done = runner_as(*words, cwd=folder, input=initialize)
        assert done.returncode == 0 and expected in done.stdout, (words, done.stdout, done.stderr)
    [source] = scan((str(plugin_dir),)).sources
    assert (source.name, source.plugin.contract) == (plugin.id, "nexo")


def _servers(text: str) -> tuple[str, ...]:
    return ("time",) if text == MCP else ("a",) if text.startswith("mcpServers") else ()


def test_the_contract_comes_from_the_cache_and_is_decided_anew_if_the_content_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNNER_CACHE", "on")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "manifest.toml"
    for text, contract in ((NEXO, "nexo"), (AINB, "ainb"), (NEXO, "nexo")):
        path.write_text(text)
        assert contract_of(load(str(path))) == contract_of(load(str(path))) == contract
        with monkeypatch.context() as patched:
            patched.setattr(manifest, "_recognise", None)  # nothing is parsed
            assert contract_at(str(path)) == contract


def test_a_rune_bundle_may_be_unpacked_one_level_down(tmp_path: Path) -> None:
    inner = tmp_path / "demo-1.0"
    inner.mkdir()
    (inner / "rterm-plugin.json").write_text(RUNE)
    found = load(str(tmp_path)).plugin
    assert found is not None and found.root == str(inner)
    (tmp_path / "README").touch()  # now the directory holds more than one entry
    assert rules(load(str(tmp_path))) == ["manifest_missing"]


def test_nothing_is_found_behind_a_link_to_a_directory(tmp_path: Path) -> None:
    outside, bundle = tmp_path / "outside", tmp_path / "bundle"
    outside.mkdir()
    bundle.mkdir()
    (outside / "rterm-plugin.json").write_text(RUNE)
    (bundle / "link").symlink_to(outside)
    assert rules(load(str(bundle))) == ["manifest_missing"]


def test_an_empty_directory_says_what_was_looked_for(tmp_path: Path) -> None:
    found = load(str(tmp_path))
    assert rules(found) == ["manifest_missing"]
    for name, _ in NAMES:
        assert name in found.diagnostics[0].message


def test_unknown_content_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    found = load(str(tmp_path / "x.json"))
    assert rules(found) == ["manifest_unknown"]
    assert "mcpServers" in found.diagnostics[0].message and "[plugin]" in found.diagnostics[0].message


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("README.md", "# Title\n\nSome words.\n", "read as TOML, line 3, column 6: "),
        ("foo.conf", "plugin:\n  id: x\n", "read as TOML, line 1, column 7: "),
        ("Makefile", "all:\n\ttrue\n", "read as TOML, line 1, column 4: "),
        ("settings", '{"plugin_id": "x",,}', "read as JSON, line 1, column 19: "),
    ],
)
def test_a_syntax_error_in_a_file_without_a_known_extension(
    tmp_path: Path, name: str, text: str, place: str
) -> None:
    (tmp_path / name).write_text(text)
    found = load(str(tmp_path / name))
    assert rules(found) == ["manifest_unknown"]
    [diagnostic] = found.diagnostics
    assert "mcpServers" in diagnostic.message and "[plugin]" in diagnostic.message
    assert place in diagnostic.hint and "--contract NAME" in diagnostic.hint


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("x.toml", "toml_syntax"),
        ("x.json", "json_syntax"),
        ("x.yaml", "yaml_syntax"),
        ("x.yml", "yaml_syntax"),
    ],
)
def test_a_syntax_error_in_a_file_with_a_known_extension(tmp_path: Path, name: str, rule: str) -> None:
    (tmp_path / name).write_text("{,")
    assert rules(load(str(tmp_path / name))) == [rule]


def test_yaml_is_known_by_the_file_name_only(tmp_path: Path) -> None:
    """JSON is YAML too, but no contract whose manifests are JSON takes it from a .yaml file."""
    text = '{"mcpServers": {"a": {"command": "x"}}}'
    for name in ("x", "x.json", "x.yaml", "x.yml"):
        (tmp_path / name).write_text(text)
    assert contract_of(load(str(tmp_path / "x"))) == contract_of(load(str(tmp_path / "x.json"))) == "mcp"
    for name in ("x.yaml", "x.yml"):
        assert rules(load(str(tmp_path / name))) == ["manifest_unknown"]


def test_the_chosen_contract_decides_the_format(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(NEXO)
    assert contract_of(load(str(tmp_path / "x.json"), contract="nexo")) == "nexo"


def test_an_unknown_contract_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(DocumentError) as caught:
        find(str(tmp_path), "nexos")
    [diagnostic] = caught.value.diagnostics
    assert diagnostic.rule == "contract_unknown" and "mcp, nexo, rune" in diagnostic.message


def test_a_server_is_chosen_and_all_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(
        json.dumps({"mcpServers": {"a": {"command": "sh"}, "b": {"url": "y"}, "c": {"command": "sh"}}})
    )
    assert rules(load(str(path))) == ["server_needed"]
    found = load(str(path), server="c").plugin
    assert found is not None and found.id == "c"
    each = load_all(str(path))
    assert [one.plugin and one.plugin.id for one in each] == ["a", "c"]
    assert [(one.rule, one.severity) for one in each[0].diagnostics] == [("server_not_hosted", "warning")]
    assert rules(load(str(tmp_path), server="x")) == ["server_unknown"]


def test_thousands_of_wrong_servers_are_not_all_listed(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps({"mcpServers": {f"s{i}": 1 for i in range(19_000)}}))
    started = time.process_time()
    found = [diagnostic for each in load_all(str(path)) for diagnostic in each.diagnostics]
    assert len(found) == 201 and found[-1].rule == "too_many_faults" and "19000" in found[-1].message
    assert time.process_time() - started < 10  # one by one they would take minutes


def test_choosing_a_server_in_a_manifest_without_servers(tmp_path: Path) -> None:
    (tmp_path / "plugin.toml").write_text(NEXO)
    for found in (load(str(tmp_path), server="x"), *load_all(str(tmp_path), server="x")):
        assert rules(found)[0] == "server_unknown"
        assert "a nexo manifest has no servers" in found.diagnostics[0].message
    (tmp_path / "plugin.toml").write_text(NEXO.replace("demo", "De mo"))
    assert rules(load(str(tmp_path), server="x")) == ["server_unknown", "plugin_id"]


def test_only_load_all_checks_the_files_beside_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the result is never cached: a cached plugin depends on no other file."""
    monkeypatch.setenv("RUNNER_CACHE", "on")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "rterm-plugin.json"
    path.write_text(RUNE.replace('"command": "x"', '"command": "./x"'))
    for _ in range(2):
        [checked] = load_all(str(path))
        assert rules(checked) == ["process_command_missing"]
        assert contract_of(load(str(path))) == "rune"
    (tmp_path / "x").write_text("#!/bin/sh\n")
    (tmp_path / "x").chmod(0o755)
    [checked] = load_all(str(path))
    assert contract_of(checked) == "rune" and checked.diagnostics == ()


@pytest.mark.parametrize("path", ["", "/nonexistent/plugin.toml", "a\0b"])
def test_paths_that_lead_nowhere(path: str) -> None:
    assert rules(load(path)) == ["file_missing"]


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(100 << 20)


def _deep(path: Path) -> None:
    path.write_text("a = " + "[" * 100_000)


def _million_keys(path: Path) -> None:
    path.write_text("".join(f"a{i}=1\n" for i in range(90_000)))


def _nul(path: Path) -> None:
    path.write_bytes(b"\0" * 100)


def _latin(path: Path) -> None:
    path.write_bytes(b'name = "\xe4"')


def _yaml_bomb(path: Path) -> None:
    path.write_text("a: &a [x,x]\nb: &b [*a,*a]\n" + "c: [*b,*b]\n" * 1000)


def _directory(path: Path) -> None:
    path.mkdir()


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


HOSTILE = [_fifo, _huge, _deep, _million_keys, _nul, _latin, _yaml_bomb, _directory, _device, _loop]


@pytest.mark.parametrize("make", HOSTILE, ids=[make.__name__[1:] for make in HOSTILE])
@pytest.mark.parametrize("name", ["plugin.toml", "unknown", "unknown.yaml"])
def test_hostile_manifests_are_refused_quickly_with_one_line(tmp_path: Path, make: object, name: str) -> None:
    assert callable(make)
    make(tmp_path / name)
    started = time.process_time()
    found = load(str(tmp_path / name))
    assert found.plugin is None
    [diagnostic] = found.diagnostics
    assert "\n" not in diagnostic.text() and len(diagnostic.text()) < 1000
    assert time.process_time() - started < 20


def test_a_wide_manifest_is_checked_quickly(tmp_path: Path) -> None:
    """Within all limits of a document, with a fault in every value."""
    path = tmp_path / "plugin.toml"
    path.write_text(NEXO + "[plugin.extends]\nhooks = [" + '"A",' * 19_900 + "]\n")
    started = time.process_time()
    assert len(load(str(path)).diagnostics) == 201
    path.write_text(NEXO + "".join(f'"expos{i}" = 1\n' for i in range(19_900)))
    assert len(load(str(path)).diagnostics) == 201
    assert time.process_time() - started < 40


def test_positions_are_found_again_for_a_plugin(tmp_path: Path) -> None:
    path = tmp_path / "plugin.toml"
    path.write_text(NEXO + '[plugin.sandbox]\nenabled = true\nfs_read_paths = ["/opt/a", "/opt/b"]\n')
    found = load(str(path)).plugin
    assert found is not None
    assert manifest.position(found, found.spec.paths[1].where) == (11, 28)
    path.unlink()
    assert manifest.position(found, found.spec.paths[1].where) == (0, 0)


def test_a_manifest_that_is_a_link_out_of_its_folder_is_not_followed(tmp_path: Path) -> None:
    """A stranger's folder: what is said about a file repeats parts of it."""
    secret = tmp_path / "secret"
    secret.write_text("root:$y$hash:1:\n")
    folder = tmp_path / "plugin"
    folder.mkdir()
    (folder / "kaged-plugin.yaml").symlink_to(secret)
    for found in (load(str(folder)), *load_all(str(folder))):
        (fault,) = found.diagnostics
        assert fault.rule == "manifest_link" and "hash" not in fault.message
    # The control: a link that stays inside is followed.
    (folder / "kaged-plugin.yaml").unlink()
    (folder / "real.yaml").write_text("name: x\n")
    (folder / "kaged-plugin.yaml").symlink_to("real.yaml")
    assert {d.rule for d in load(str(folder)).diagnostics} >= {"missing_key"}


def test_a_current_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    (fault,) = load("plugin").diagnostics
    assert fault.rule == "file_missing" and "current folder" in fault.message and fault.hint
