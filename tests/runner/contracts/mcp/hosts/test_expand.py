"""Variables by the rules of each host, files of variables, and which variables a server asks for."""

from __future__ import annotations

import pytest

from runner.contracts.mcp import manifest
from runner.contracts.mcp.hosts.expand import Reference, expand_text, references, with_folders
from runner.contracts.mcp.hosts.fill import parse_dotenv
from runner.contracts.mcp.hosts.find import place_of
from runner.plugin import Plugin
from sandbox.document.read import parse
from tests.runner.contracts.mcp.hosts.test_hosts import FILES, HOME

VALUES = {"A": "one", "EMPTY": "", "NESTED": "${A} $A {env:A}", "input:key": "typed"}


def value(reference: Reference) -> str | None:
    return f"<{reference.name}>" if reference.kind == "file" else VALUES.get(reference.name)


@pytest.mark.parametrize(
    ("rules", "text", "filled"),
    [
        ("claude", "${A}/x ${B} ${B:-d} ${A:-d} $A", "one/x ${B} d one $A"),
        ("claude", "${EMPTY}|${B:-}|${state_dir}|${plugin_dir}", "||${state_dir}|${plugin_dir}"),
        ("claude", "${NESTED}", "${A} $A {env:A}"),  # what a value holds is not read again
        ("claude", "${A", "${A"),
        ("vscode", "${env:A}|${env:B}|${A}|$A", "one||${A}|$A"),
        ("vscode", "${input:key}|${input:other}|${command:x.y}", "typed||"),
        ("vscode", "${workspaceFolder}", "${workspaceFolder}"),
        ("cursor", "${env:A}|${env:B}|${input:key}", "one||${input:key}"),
        ("windsurf", "${env:A}|${file:/etc/x}", "one|</etc/x>"),
        ("roo", "${env:A}|${env:B}", "one|${env:B}"),
        ("gemini", "$A ${A} $B ${B:-d} $", "one one $B ${B:-d} $"),
        ("opencode", "{env:A}|{env:B}|{file:./k}|${A}", "one||<./k>|${A}"),
        ("continue", "${{ secrets.A }}|${{inputs.A}}|${{ secrets.B }}", "one|one|${{ secrets.B }}"),
        ("", "${A} $A {env:A}", "${A} $A {env:A}"),
    ],
)
def test_each_hosts_rules(rules: str, text: str, filled: str) -> None:
    assert expand_text(text, rules, value) == filled


def test_folders_are_filled_in_without_the_rest() -> None:
    text = (
        "${workspaceFolder}|${workspaceFolderBasename}|${userHome}|${pathSeparator}|${/}|${env:A}|${env:HOME}"
    )
    assert with_folders(text, "vscode", "/src/shop", "/home/me") == (
        "/src/shop|shop|/home/me|/|/|${env:A}|/home/me"
    )
    assert with_folders("${workspaceFolder}", "vscode", "", "/home/me") == "${workspaceFolder}"


def test_references_in_a_word_are_found() -> None:
    assert list(references("${A:-x}${state_dir}", "claude")) == [Reference("env", "A", "x")]
    assert [each.kind for each in references("${env:A}${input:b}${userHome}", "vscode")] == [
        "env",
        "ask",
        "folder",
    ]


def test_a_file_of_variables() -> None:
    text = """# comment
A=1
export B = two words  # why
  C='single $A # kept'
D="double \\"quoted\\" \\n line" # comment
E=
F="open
9X=no
no equals sign
G=a#b
H=#nothing
A=again\r
"""
    assert parse_dotenv(text) == {
        "A": "again",
        "B": "two words",
        "C": "single $A # kept",
        "D": 'double "quoted" \n line',
        "E": "",
        "F": '"open',
        "G": "a#b",
        "H": "",
    }


def plugin(file: str, place: str, server: str | None = None) -> Plugin:
    found = place_of(place, HOME)
    assert found is not None
    document = parse(place, (FILES / file).read_bytes(), found.host.syntax)
    read, diagnostics = manifest.read(document, server=server, home=HOME)
    assert read is not None, [each.text() for each in diagnostics]
    assert [each.rule for each in diagnostics if each.rule != "server_disabled"] == []
    return read


def asked(found: Plugin) -> list[str]:
    return [request.name for request in found.spec.env if request.value is None]


def test_the_variables_in_its_words_are_asked_for() -> None:
    tickets = plugin("mcp.project.json", "/src/shop/.mcp.json")
    assert asked(tickets) == ["TOOLS", "DB_URL", "TICKETS_TOKEN"]
    assert all(
        request.fills and not request.required for request in tickets.spec.env if request.value is None
    )
    assert asked(plugin("gemini.json", "/src/shop/.gemini/settings.json")) == ["DB_URL", "EXTERNAL_API_KEY"]
    assert asked(plugin("opencode.jsonc", "/src/shop/opencode.jsonc")) == ["EVERYTHING_TOKEN"]
    assert asked(plugin("continue.yaml", f"{HOME}/.continue/config.yaml")) == ["SQLITE_KEY"]
    codex = plugin("codex.toml", f"{HOME}/.codex/config.toml")
    assert asked(codex) == ["CONTEXT7_KEY", "EXTRA"] and not any(each.fills for each in codex.spec.env)
    assert asked(plugin("goose.yaml", f"{HOME}/.config/goose/config.yaml")) == [
        "GITHUB_PERSONAL_ACCESS_TOKEN"
    ]


def test_a_plain_entry_is_no_template() -> None:
    assert plugin("plain.json", f"{HOME}/.factory/mcp.json").template is None


def test_the_folder_of_a_project_and_of_a_user() -> None:
    local = plugin("vscode.json", "/src/shop/.vscode/mcp.json", "local")
    assert local.entrypoint is not None and local.project is not None
    assert local.entrypoint[:3] == (f"{HOME}/bin/local-server", (), "/src/shop/server")
    assert (local.project.path, local.project.within) == ("/src/shop/server", "/src/shop")
    default = plugin("vscode.json", "/src/shop/.vscode/mcp.json", "perplexity")
    assert default.entrypoint is not None and default.project is not None
    assert default.entrypoint.directory == default.project.path == "/src/shop"
    own = plugin("codex.toml", f"{HOME}/.codex/config.toml", "off line")
    assert own.project is not None and (own.project.path, own.project.within) == ("/srv/work", "")
    strangers = plugin("codex.toml", "/src/shop/.codex/config.toml", "off line")
    assert strangers.project is not None and strangers.project.within == "/src/shop"


def test_servers_of_projects_in_one_file_have_states_of_their_own() -> None:
    shop = plugin("claude.json", f"{HOME}/.claude.json", "/home/me/shop:db")
    blog = plugin("claude.json", f"{HOME}/.claude.json", "/home/me/blog:db")
    assert shop.id == blog.id == "db" and shop.mark != blog.mark
    assert shop.entrypoint is not None and shop.entrypoint.directory == "/home/me/shop"
    assert plugin("claude.json", f"{HOME}/.claude.json", "github").mark == ""  # the user's own


@pytest.mark.parametrize(
    ("file", "place", "server", "rule", "said"),
    [
        ("claude.json", f"{HOME}/.claude.json", None, "server_needed", "'/home/me/shop:db'"),
        ("claude.json", f"{HOME}/.claude.json", "db", "server_ambiguous", "'/home/me/shop:db'"),
        ("claude.json", f"{HOME}/.claude.json", "sentry", "server_not_stdio", "over the network"),
        ("windsurf.json", f"{HOME}/.codeium/windsurf/mcp_config.json", None, "server_disabled", "'github'"),
        ("zed.json", "/src/.zed/settings.json", "mcp-server-context7", "server_not_stdio", "extension"),
        ("zed.json", "/src/.zed/settings.json", "olt", "server_unknown", "'old'"),
    ],
)
def test_a_choice_that_is_refused(file: str, place: str, server: str | None, rule: str, said: str) -> None:
    found = place_of(place, HOME)
    assert found is not None
    document = parse(place, (FILES / file).read_bytes(), found.host.syntax)
    read, diagnostics = manifest.read(document, server=server, home=HOME)
    assert read is None
    [fault] = diagnostics
    assert fault.rule == rule and said in fault.message + fault.hint


def test_the_only_server_that_can_be_hosted_needs_no_choice() -> None:
    assert plugin("zed.json", "/src/.zed/settings.json").id == "old"  # the others: remote, disabled, Zed's
    assert plugin("windsurf.json", f"{HOME}/.codeium/windsurf/mcp_config.json", "github").id == "github"


def test_a_wrapped_entry_is_read_as_the_server_inside() -> None:
    text = """{"mcpServers": {"a": {"command": "/opt/runner", "args":
        ["run", "--wrapped", "{}", "--name", "a", "--", "server", "-x"]}}}"""
    read, _ = manifest.read(parse("/src/.cursor/mcp.json", text.encode(), "json"), home=HOME)
    assert read is not None and read.entrypoint is not None and read.template is not None
    assert (read.entrypoint.command, read.entrypoint.args) == ("server", ("-x",))
    assert read.template.outer == ("--wrapped", "{}", "--name", "a")
