"""runner check and runner schema: what is printed, for people and for programs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from runner.cli import check, schema
from runner.contracts.mcp.wrap.configuration import configuration
from runner.contracts.registry import contract_names
from tests.manifests import nexo, rune
from tests.tables import one_case

NEXO = nexo("demo")


def put_program(path: Path) -> None:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


@pytest.fixture(autouse=True)
def _in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_CACHE", "off")
    monkeypatch.chdir(tmp_path)
    put_program(tmp_path / "run")
    (tmp_path / "good.toml").write_text(NEXO)
    (tmp_path / "bad.toml").write_text(NEXO + '[plugin.sandbox]\nnetwrok = "host"\n[plugin.meta]\nx = 1\n')
    (tmp_path / "mcp.json").write_text(
        '{"mcpServers": {\n"a": {"command": "sh"},\n"b": {"url": "x"},\n"c": {"command": ""}}}'
    )


def run(module: Any, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    status: int = module.run(parser.parse_args(arguments))
    return status


def test_a_good_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(check, "good.toml") == 0
    assert capsys.readouterr().out == "good.toml: ok: demo 1.0.0 (nexo)\n"


def test_a_bad_one_with_places_and_hints(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(check, "bad.toml", "good.toml") == 20
    assert capsys.readouterr().out.splitlines() == [
        "bad.toml:10:1: error: sandbox_unknown_key: the key 'netwrok' is unknown in [plugin.sandbox]",
        "    did you mean 'network'?",
        "bad.toml:12:1: warning: unknown_key: the key 'x' is unknown in [plugin.meta] and ignored",
        "good.toml: ok: demo 1.0.0 (nexo)",
        "1 error, 1 warning",
    ]


def test_warnings_alone_are_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "warn.toml").write_text(NEXO + "x = 1\n")
    assert run(check, "warn.toml") == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "warn.toml: ok: demo 1.0.0 (nexo)",
        "0 errors, 1 warning",
    ]


def test_an_absolute_path_stays_absolute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(check, str(tmp_path / "bad.toml"))
    assert capsys.readouterr().out.startswith(f"{tmp_path}/bad.toml:10:1: ")


def test_every_server_is_checked_or_the_one_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(check, "mcp.json") == 20
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mcp.json")]
    assert [line.split(": ")[:3] for line in lines] == [
        ["mcp.json:3:1", "warning", "server_not_hosted"],
        ["mcp.json:4:7", "error", "command_missing"],
    ]
    assert run(check, "--server", "a", "mcp.json") == 0
    assert run(check, "--server", "b", "mcp.json") == 20


def test_what_a_server_names_has_to_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    entry = {
        "command": "no-such-program",
        "args": [f"{tmp_path}/data", f"--db={tmp_path}/data/new.db", f"--log={tmp_path}/none/x.log", "/v1/x"],
        "env": {"CACHE": f"{tmp_path}/cache", "ROOM": "${state_dir}/x"},
    }
    for command, status, expected in (
        ("no-such-program", 20, ["error: entrypoint_missing: no-such-program is not on PATH"]),
        ("./no", 20, ["error: entrypoint_missing: ./no does not exist in"]),
        ("/bin/true", 0, []),
        ("${plugin_dir}/x", 0, []),
        ("npx", 0, ["warning: launcher_needs_network"]),
    ):
        (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"a": {**entry, "command": command}}}))
        assert run(check, "mcp.json") == status
        said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mcp.json:1:")]
        missing = [line for line in said if "path_missing" in line]
        assert len(missing) == (0 if command == "npx" else 2)
        for name, path in (("an argument", "none"), ("CACHE", "cache"))[: len(missing)]:
            assert any(f"{name} names {tmp_path}/{path}" in line for line in missing)
        others = [line for line in said if line not in missing]
        assert len(others) == len(expected)
        assert all(text in line for text, line in zip(expected, others, strict=True))


def test_a_missing_program_is_found_beside_other_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"command": "no-such-program", "args": "x", "x-sandbox": {"raed": []}}
    for entries in ({"a": entry}, {"a": entry, "b": {"command": "/bin/true"}}):
        (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": entries}))
        assert run(check, "mcp.json") == 20
        said = [line for line in capsys.readouterr().out.splitlines() if ": error: " in line]
        rules = {line.split(": ")[2] for line in said}
        assert rules == {"invalid_type", "sandbox_unknown_key", "entrypoint_missing"} and len(said) == 3


@pytest.mark.parametrize(
    ("name", "servers", "warned"),
    [
        (".cursor/mcp.json", "mcpServers", False),
        (".vscode/mcp.json", "servers", False),
        ("mcp.json", "mcpServers", False),
        ("mine.json", "mcpServers", False),
        (".mcp.json", "mcpServers", True),
    ],
)
def test_comments_are_read_as_wrap_reads_them(
    tmp_path: Path, name: str, servers: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a warning where the host may take JSON alone. What is wrong apart from comments is found."""
    (file := tmp_path / name).parent.mkdir(exist_ok=True)
    text = f'{{\n  // mine\n  "{servers}": {{"a": {{"command": "/bin/true", "args": ["x",],}},}},\n}}\n'
    file.write_text(text)
    assert configuration(str(file), text.encode(), "/nobody", {}).servers[0].argv == ("/bin/true", "x")
    assert run(check, name) == 0
    assert ("json_comments" in capsys.readouterr().out) is warned
    file.write_text(text.replace('"x",', '"x" 1'))
    assert run(check, name) == 20
    assert f"{name}:3:" in capsys.readouterr().out


def test_comments_in_a_manifest_of_another_contract(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (
        ("rterm-plugin.json", '{"plugin_id": "x", // mine\n}'),
        ("x.json", '{"plugin_id": "x", // mine\n"process": {}}'),
    ):
        (tmp_path / name).write_text(text)
        assert run(check, name) == 20
        assert f"{name}:1:20: error: json_syntax" in capsys.readouterr().out


def test_what_a_rune_bundle_names_has_to_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = rune("demo", "a", dir="sub")
    (tmp_path / "rterm-plugin.json").write_text(json.dumps(bundle, indent=1))
    (tmp_path / "run").unlink()
    assert run(check, "rterm-plugin.json") == 20
    assert capsys.readouterr().out.splitlines() == [
        "rterm-plugin.json:6:3: error: process_command_missing: the program './run' does not exist",
        f"    a relative path starts at {tmp_path}",
        "rterm-plugin.json:7:3: error: process_dir_missing: process.dir 'sub' does not exist",
        "    it is relative to the bundle's folder",
        "2 errors, 0 warnings",
    ]
    put_program(tmp_path / "run")
    (tmp_path / "sub").mkdir()
    assert run(check, "rterm-plugin.json") == 0


def test_the_hosts_network_needs_the_operator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = "NEXO_PLUGIN_SANDBOX_HOST_NET_ALLOW"
    (tmp_path / "net.toml").write_text(NEXO + '[plugin.sandbox]\nenabled = true\nnetwork = "host"\n')
    monkeypatch.delenv(variable, raising=False)
    assert run(check, "net.toml") == 20
    error, hint, *_ = capsys.readouterr().out.splitlines()
    assert error.startswith(
        "net.toml:11:1: error: network_refused: a launch refuses network host: policy default"
    )
    assert "[network] ceiling" in hint and f"{variable}=1" in hint
    # What a launch here gives is no fault.
    monkeypatch.setenv(variable, "1")
    assert run(check, "net.toml") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("net.toml: ok: ")


def test_a_contract_can_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(check, "--contract", "rune", "mcp.json") == 20
    assert "missing_key" in capsys.readouterr().out
    assert run(check, "--contract", "nope", "mcp.json") == 20
    assert f"--contract takes {', '.join(contract_names())}" in capsys.readouterr().out


def test_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(check, "gone.toml") == 20
    assert capsys.readouterr().out.splitlines()[0] == "gone.toml: error: file_missing: there is no such file"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(check, "--format", "json", "bad.toml", "good.toml") == 20
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["ok"]) == ("runner.check.v1", False)
    assert (document["errors"], document["warnings"]) == (1, 1)
    bad, good = document["files"]
    assert good == {
        "file": "good.toml",
        "origin": "",
        "plugins": [{"id": "demo", "version": "1.0.0", "contract": "nexo"}],
        "diagnostics": [],
    }
    assert bad["plugins"] == []
    assert bad["diagnostics"][0] == {
        "file": "bad.toml",
        "line": 10,
        "column": 1,
        "rule": "sandbox_unknown_key",
        "message": "the key 'netwrok' is unknown in [plugin.sandbox]",
        "hint": "did you mean 'network'?",
        "severity": "error",
    }


# The parts of the SARIF 2.1.0 schema that concern what we write; the whole of it is 100 kB.
SARIF: dict[str, Any] = {
    "type": "object",
    "required": ["version", "runs"],
    "properties": {
        "$schema": {"type": "string", "format": "uri"},
        "version": {"enum": ["2.1.0"]},
        "runs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["tool"],
                "additionalProperties": False,
                "properties": {
                    "tool": {
                        "type": "object",
                        "required": ["driver"],
                        "properties": {"driver": {"type": "object", "required": ["name"]}},
                    },
                    "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                    "results": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["message", "ruleId", "ruleIndex", "level", "locations"],
                            "additionalProperties": False,
                            "properties": {
                                "ruleId": {"type": "string"},
                                "ruleIndex": {"type": "integer", "minimum": 0},
                                "level": {"enum": ["none", "note", "warning", "error"]},
                                "message": {"type": "object", "required": ["text"]},
                                "locations": {
                                    "type": "array",
                                    "items": {
                                        "properties": {
                                            "physicalLocation": {
                                                "required": ["artifactLocation"],
                                                "properties": {
                                                    "region": {
                                                        "properties": {
                                                            "startLine": {"type": "integer", "minimum": 1},
                                                            "startColumn": {"type": "integer", "minimum": 1},
                                                        }
                                                    }
                                                },
                                            }
                                        }
                                    },
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}


def test_sarif(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = tmp_path / "ä b.toml"
    odd.write_text(NEXO.replace("demo", "Demo"))
    assert run(check, "--format", "sarif", "bad.toml", str(odd), "gone.toml") == 20
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, SARIF)
    [one] = document["runs"]
    rules = [rule["id"] for rule in one["tool"]["driver"]["rules"]]
    assert rules == sorted(set(rules))
    described = {r["id"]: r["shortDescription"]["text"] for r in one["tool"]["driver"]["rules"]}
    assert described["sandbox_unknown_key"] == "The key … is unknown in [plugin.sandbox]."
    assert described["file_missing"] == "There is no such file."
    assert all(rules[result["ruleIndex"]] == result["ruleId"] for result in one["results"])
    first, second, third, fourth = (result["locations"][0]["physicalLocation"] for result in one["results"])
    assert first == {
        "artifactLocation": {"uri": "bad.toml"},
        "region": {"startLine": 10, "startColumn": 1},
    }
    assert second["artifactLocation"]["uri"] == "bad.toml"
    assert third["artifactLocation"]["uri"] == f"file://{tmp_path}/%C3%A4%20b.toml"
    assert "region" not in fourth


KAGED = """\
name: demo
version: 1.0.0
kaged_api: 1
description: d
command: ["./run"]
methods: [demo.a]
"""
RUNE = rune("demo", "a")
VAI = """\
api_version = "vai.plugin.v1"
package_id = "a/b"
version = "1.0.0"
name = "n"
[runtime]
protocol = "vai.rpc.v1"
entrypoint = ["./run"]
[[exports]]
id = "a"
kind = "tool"
[exports.tool]
effect_class = "read_only"
input_schema = "in.json"
"""

# A file's name, its text, and the messages about it: all faults at once, in the words of its format.
WRONG = {
    "a misspelled command, and a program that is not there": (
        "plugin.toml",
        NEXO.replace("command", "comand"),
        ["there is no command in [plugin.entrypoint], so the runner has nothing to start"],
    ),
    "no program": (
        "plugin.toml",
        NEXO.replace("./run", "./rnu") + '[plugin.sandbox]\nnetwrok = "x"\n',
        ["the key 'netwrok' is unknown in [plugin.sandbox]", "the program './rnu' does not exist"],
    ),
    "a name that is on no PATH": (
        "plugin.toml",
        NEXO.replace("./run", "no-such-program"),
        ["the program 'no-such-program' is not on PATH here"],
    ),
    "a folder": ("plugin.toml", NEXO.replace("./run", "../"), ["the program '../' is not a file"]),
    "a misspelled key in YAML": (
        "kaged-plugin.yaml",
        KAGED.replace("command", "comand"),
        ["the key 'command' is missing in the document, which has 'comand'"],
    ),
    "limits in YAML": (
        "kaged-plugin.yaml",
        KAGED.replace("api: 1", "api: 0").replace(': ["./run"]', ": []").replace(" d\n", " ''\n")
        + "hook_timeout_sec: 61\n",
        [
            "'kaged_api' is 0, and has to be greater than 0",
            "'description' is empty",
            "'command' is empty",
            "'hook_timeout_sec' is 61, and has to be at most 60",
        ],
    ),
    "types in YAML": (
        "kaged-plugin.yaml",
        KAGED + "hooks: pre_compact\nenv: []\nconfig_schema: 1\nknobs: {a: {min: x}}\n",
        [
            "'hooks' has to be a list, not a string",
            "'env' has to be a mapping, not a list",
            "'config_schema' has to be a mapping, not an integer",
            "the key 'type' is missing in 'knobs.a'",
        ],
    ),
    "a long text": (
        "kaged-plugin.yaml",
        KAGED.replace(" d\n", f" {'d' * 201}\n"),
        ["'description' has 201 characters, and at most 200 are allowed"],
    ),
    "JSON": (
        "rterm-plugin.json",
        json.dumps({**RUNE, "process": {"comand": "./x", "args": {}}}),
        [
            "the key 'command' is missing in 'process', which has 'comand'",
            "'args' has to be an array, not an object",
        ],
    ),
    "JSON, and no program": (
        "rterm-plugin.json",
        json.dumps({**RUNE, "process": {"command": "./x"}, "tools": []}),
        ["the bundle has no tools", "the program './x' does not exist"],
    ),
    "MCP": ("mcp.json", '{"mcpServers": {"a": {"comand": "sh"}}}', ["the server has no command"]),
    "MCP, and no program": (
        "mcp.json",
        '{"mcpServers": {"a": {"command": "./x"}}}',
        ["./x does not exist in {}"],
    ),
    "MCP, and no right to execute it": (
        "mcp.json",
        '{"mcpServers": {"a": {"command": "./plain"}}}',
        ["the program './plain' is not executable"],
    ),
    "a package": (
        "vai-plugin.toml",
        VAI.replace("./run", "./rnu").replace('kind = "tool"', 'kind = "tol"'),
        [
            "'kind' is 'tol'; possible are 'harness', 'tool', 'hook' or 'compactor'",
            "the program 'rnu' cannot be found in the package: No such file or directory",
            "the schema 'in.json' cannot be read: No such file or directory",
        ],
    ),
    "a policy without its version": (
        "mine.toml",
        '[limits.memory]\nceiling = "1G"\n[write]\ncieling = []\n',
        ["the version is missing", "write.cieling is not a key of a policy"],
    ),
    "one of common tables": (
        "mine.toml",
        '[network]\nceiling = "none"\nhots = []\n',
        ["the version is missing", "network.hots is not a key of a policy"],
    ),
    "no command": (
        "mcp.json",
        '{"mcpServers": {"a": {"comand": "x", "x-sandbox": {"raed": []}}, "b": {"command": "", "args": 1}}}',
        [
            "the server has no command",
            "the key 'raed' is unknown in 'mcpServers.a.x-sandbox'",
            "the server has no 'command' to start",
            "'args' has to be an array, not an integer",
        ],
    ),
}


@one_case(("name", "text", "messages"), WRONG.values(), ids=WRONG)
def test_all_faults_at_once_in_plain_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, messages: list[str]
) -> None:
    put_program(tmp_path / "run")
    (tmp_path / "plain").touch(0o644)
    (tmp_path / name).write_text(text)
    assert run(check, "--format", "json", str(tmp_path / name)) in (20, 26)
    (file,) = json.loads(capsys.readouterr().out)["files"]
    found = [each["message"] for each in file["diagnostics"] if each["severity"] == "error"]
    assert [each for each in messages if each.replace("{}", str(tmp_path)) not in found] == [], found


def test_the_file_of_a_configuration_is_blamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = "config_schema: {type: object, properties: {a: {type: string}}}\n"
    (tmp_path / "kaged-plugin.yaml").write_text(KAGED + schema)
    (tmp_path / "conf.json").write_text('{"a": 1}')
    for word, file in (("@conf.json", "conf.json"), ('{"a": 1}', "--config")):
        assert run(check, "--config", word, "kaged-plugin.yaml") == 20
        assert capsys.readouterr().out.startswith(f"{file}: error: config_invalid: ")


def test_sarif_without_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(check, "--format", "sarif", "good.toml") == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, SARIF)
    assert document["runs"][0]["results"] == []


def test_no_format_lets_a_manifest_write_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "x\x1b[2J\n.toml"
    (tmp_path / name).write_text(
        NEXO + '[plugin."\\u001b]0;owned\\u0007"]\n[plugin.extends]\nhooks = ["\\u009b"]\n'
    )
    for format_ in ("text", "json", "sarif"):
        assert run(check, "--format", format_, name) == 20
        out = capsys.readouterr().out
        assert "owned" in out
        assert not {c for c in out if not c.isprintable()} - {"\n"}


@pytest.mark.parametrize("contract", ["nexo", "rune", "mcp"])
def test_schema(contract: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(schema, contract) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(document)


def test_schema_of_an_unknown_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(schema, "nope") == 2
    known = ", ".join(contract_names())
    assert (
        capsys.readouterr().err == f"runner schema: there is no contract 'nope'; there are {known}, policy\n"
    )
