"""Every host's configuration, as people have it: recognised by its place, and read to its servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from runner.contracts.mcp.hosts.entries import GENERIC, servers_of
from runner.contracts.mcp.hosts.find import host_by_content, host_of, known_files, place_of
from runner.contracts.mcp.hosts.host import HostServer
from runner.contracts.mcp.hosts.table import GOOSE, HOSTS
from sandbox.document.read import Document, parse
from tests.conftest import ROOT
from tests.tables import one_case

FILES = Path(__file__).parent / "files"
HOME = "/home/me"
STORAGE = f"{HOME}/.config/Code/User/globalStorage"


class Sample(NamedTuple):
    file: str  # of FILES
    host: str
    places: tuple[str, ...]
    servers: tuple[tuple[str, tuple[str, ...]], ...]  # name and argv of those that can be hosted
    remote: tuple[str, ...] = ()
    disabled: tuple[str, ...] = ()


SAMPLES = (
    Sample(
        "claude_desktop_config.json",
        "Claude Desktop",
        (f"{HOME}/.config/Claude/claude_desktop_config.json",),
        (
            ("filesystem", ("/usr/local/bin/mcp-server-filesystem", "/srv/documents")),
            ("memory", ("mcp-server-memory",)),
        ),
    ),
    Sample(
        "claude.json",
        "Claude Code",
        (f"{HOME}/.claude.json",),
        (
            ("github", ("github-mcp-server", "stdio")),
            ("/home/me/shop:db", ("./bin/db-server", "${DB:-local}")),
            ("/home/me/blog:db", ("blog-db",)),
            ("/home/me/blog:github", ("other-github",)),
        ),
        ("sentry",),
    ),
    Sample(
        "mcp.project.json",
        "Claude Code",
        ("/src/shop/.mcp.json",),
        (("tickets", ("${TOOLS:-/opt/tools}/tickets", "--db", "${DB_URL}")),),
    ),
    Sample(
        "cursor.json",
        "Cursor",
        (f"{HOME}/.cursor/mcp.json", "/src/shop/.cursor/mcp.json"),
        (("github", ("${userHome}/.local/bin/github-mcp-server", "stdio", "--root", "${workspaceFolder}")),),
        ("linear",),
    ),
    Sample(
        "vscode.json",
        "VS Code",
        (
            "/src/shop/.vscode/mcp.json",
            f"{HOME}/.config/Code/User/mcp.json",
            f"{HOME}/.config/Code - Insiders/User/mcp.json",
            f"{HOME}/.vscode-server/data/User/mcp.json",
        ),
        (
            ("perplexity", ("server-perplexity", "--root", "${workspaceFolder}", "--quiet")),
            ("local", ("~/bin/local-server",)),
        ),
        ("GitHub",),
    ),
    Sample(
        "copilot.json",
        "GitHub Copilot",
        (f"{HOME}/.copilot/mcp-config.json", "/opt/copilot/mcp-config.json"),
        (("playwright", ("mcp-server-playwright",)),),
        ("docs",),
    ),
    Sample(
        "windsurf.json",
        "Windsurf",
        (f"{HOME}/.codeium/windsurf/mcp_config.json", f"{HOME}/.codeium/mcp_config.json"),
        (("github", ("github-mcp-server", "stdio")),),
        ("figma",),
        ("github",),
    ),
    Sample(
        "zed.json",
        "Zed",
        (f"{HOME}/.config/zed/settings.json", "/src/shop/.zed/settings.json"),
        (("old", ("old-server", "--stdio")), ("new", ("new-server", "-v"))),
        ("web",),
        ("new",),
    ),
    Sample(
        "cline.json",
        "Cline",
        (
            f"{STORAGE}/saoudrizwan.claude-dev/settings/cline_mcp_settings.json",
            f"{HOME}/.cline/data/settings/cline_mcp_settings.json",
            "/opt/cline.json",
        ),
        (("weather", ("node", "/opt/weather/index.js")),),
        ("far",),
    ),
    Sample(
        "roo.json",
        "Roo Code",
        (f"{STORAGE}/rooveterinaryinc.roo-cline/settings/mcp_settings.json", "/src/shop/.roo/mcp.json"),
        (("lint", ("linter", "${workspaceFolder}/src", "${env:LINT_MODE}")),),
    ),
    Sample(
        "continue.yaml",
        "Continue",
        (f"{HOME}/.continue/config.yaml", "/src/shop/.continue/mcpServers/sqlite.yaml"),
        (("Sqlite", ("mcp-server-sqlite", "--db-path", "/srv/shop.db")),),
        ("Docs",),
    ),
    Sample(
        "plain.json", "Continue", ("/src/shop/.continue/mcpServers/web.json",), (("web", ("fetcher", "-q")),)
    ),
    Sample(
        "gemini.json",
        "Gemini CLI",
        (f"{HOME}/.gemini/settings.json", "/src/shop/.gemini/settings.json", "/etc/gemini-cli/settings.json"),
        (("py", ("python3", "-m", "server")),),
        ("web", "events"),
    ),
    Sample(
        "codex.toml",
        "Codex",
        (f"{HOME}/.codex/config.toml", "/src/shop/.codex/config.toml", "/opt/codex/config.toml"),
        (("context7", ("context7-mcp", "--transport", "stdio")), ("off line", ("offline",))),
        ("figma",),
        ("off line",),
    ),
    Sample(
        "goose.yaml",
        "Goose",
        (f"{HOME}/.config/goose/config.yaml",),
        (("github", ("github-mcp-server", "stdio")),),
        ("web",),
    ),
    Sample(
        "lmstudio.json",
        "LM Studio",
        (f"{HOME}/.lmstudio/mcp.json", f"{HOME}/.cache/lm-studio/mcp.json"),
        (("time", ("mcp-server-time", "--local-timezone", "${env:TZ}")),),
        ("hf",),
    ),
    Sample(
        "junie.json",
        "Junie",
        (f"{HOME}/.junie/mcp/mcp.json", "/src/shop/.junie/mcp/mcp.json"),
        (("files", ("mcp-server-filesystem", "/srv")),),
    ),
    Sample(
        "opencode.jsonc",
        "opencode",
        (f"{HOME}/.config/opencode/opencode.json", "/src/shop/opencode.jsonc", "/src/shop/opencode.json"),
        (("everything", ("mcp-server-everything", "stdio")),),
        ("jira",),
        ("jira",),
    ),
    Sample(
        "opencode2.json", "opencode", ("/src/shop/opencode.json",), (("one", ("one",)),), disabled=("one",)
    ),
    Sample(
        "amazonq.json",
        "Amazon Q",
        (
            f"{HOME}/.aws/amazonq/mcp.json",
            f"{HOME}/.aws/amazonq/cli-agents/mine.json",
            f"{HOME}/.aws/amazonq/agents/default.json",
            "/src/shop/.amazonq/mcp.json",
        ),
        (("aws-docs", ("awslabs.aws-documentation-mcp-server",)),),
        ("far",),
    ),
    Sample(
        "kiro.json",
        "Kiro",
        (f"{HOME}/.kiro/settings/mcp.json",),
        (("web", ("fetcher",)),),
        disabled=("web",),
    ),
    Sample("plain.json", "Factory", (f"{HOME}/.factory/mcp.json",), (("web", ("fetcher", "-q")),)),
    Sample("plain.json", "Kimi", (f"{HOME}/.kimi/mcp.json",), (("web", ("fetcher", "-q")),)),
    Sample("plain.json", "Trae", (f"{HOME}/.config/Trae/User/mcp.json",), (("web", ("fetcher", "-q")),)),
    Sample(
        "plain.json",
        "Antigravity",
        (f"{HOME}/.gemini/antigravity/mcp_config.json",),
        (("web", ("fetcher", "-q")),),
    ),
    Sample(
        "amp.json",
        "Amp",
        (f"{HOME}/.config/amp/settings.json",),
        (("playwright", ("playwright-mcp", "--headless")),),
        ("semgrep",),
    ),
    Sample(
        "vibe.toml",
        "Mistral Vibe",
        (f"{HOME}/.vibe/config.toml",),
        (("fetch", ("mcp-server-fetch", "--quiet")),),
        ("far",),
    ),
)
ENVIRON = {
    "CODEX_HOME": "/opt/codex",
    "COPILOT_HOME": "/opt/copilot",
    "CLINE_MCP_SETTINGS_PATH": "/opt/cline.json",
}
CASES = [(sample, place) for sample in SAMPLES for place in sample.places]


def document(file: str, place: str) -> Document:
    found = place_of(place, HOME, ENVIRON)
    assert found is not None
    return parse(place, (FILES / file).read_bytes(), found.host.syntax)


def servers(file: str, place: str) -> dict[str, HostServer]:
    read = document(file, place)
    host = host_of(place, read, home=HOME, environ=ENVIRON)
    assert host is not None
    return {server.label: server for server in servers_of(read, host)}


@one_case(("sample", "place"), CASES, ids=[f"{s.host}-{p}" for s, p in CASES])
def test_a_hosts_file_is_read_to_its_servers(sample: Sample, place: str) -> None:
    read = document(sample.file, place)
    host = host_of(place, read, home=HOME, environ=ENVIRON)
    assert host is not None and host.name == sample.host
    found = servers_of(read, host)
    assert not [server.fault for server in found if server.fault]
    assert tuple((s.label, s.argv) for s in found if not s.skipped) == sample.servers
    assert tuple(s.name for s in found if s.remote) == sample.remote
    assert tuple(s.name for s in found if s.disabled) == sample.disabled


def test_every_host_has_a_sample() -> None:
    assert {sample.host for sample in SAMPLES} == {host.name for host in HOSTS}


@one_case(("sample", "place"), CASES, ids=[f"{s.host}-{p}" for s, p in CASES])
def test_the_keys_of_a_server_lead_to_its_words(sample: Sample, place: str) -> None:
    """`runner wrap` edits the file at these places."""
    read = document(sample.file, place)
    for server in servers(sample.file, place).values():
        if server.skipped:
            continue
        command = at(read.data, server.command_keys)
        words = command if server.shape == "argv" else [command]
        assert isinstance(words, list)
        if server.args_keys is not None:
            words = [*words, *at(read.data, server.args_keys)]
        assert tuple(words) == server.argv
        if server.env_keys is not None:
            assert set(at(read.data, server.env_keys)) >= set(dict(server.env))
        line, column = read.where(server.command_keys)
        assert line > 0 and column > 0


def at(data: Any, keys: tuple[str | int, ...]) -> Any:
    for key in keys:
        data = data[key]
    return data


def test_other_keys_of_an_entry_are_read() -> None:
    vscode = servers("vscode.json", "/src/shop/.vscode/mcp.json")
    assert vscode["perplexity"].env == (
        ("PERPLEXITY_API_KEY", "${input:perplexity-key}"),
        ("RETRIES", "3"),
    )
    assert vscode["perplexity"].env_file == "${workspaceFolder}/.env"
    assert vscode["local"].cwd == "server" and vscode["local"].args_keys is None
    codex = servers("codex.toml", f"{HOME}/.codex/config.toml")
    assert codex["context7"].passed == ("CONTEXT7_KEY", "EXTRA")
    assert codex["context7"].env == (("LOG", "quiet"),) and codex["off line"].cwd == "/srv/work"
    goose = servers("goose.yaml", f"{HOME}/.config/goose/config.yaml")
    assert goose["github"].passed == ("GITHUB_PERSONAL_ACCESS_TOKEN",) and "developer" not in goose
    zed = servers("zed.json", f"{HOME}/.config/zed/settings.json")
    assert zed["old"].shape == "nested" and zed["new"].shape == "plain"
    assert zed["old"].env == (("A", "1"),)
    assert "extension" in zed["mcp-server-context7"].skipped and not zed["mcp-server-context7"].remote


def test_goose_wrote_its_entries_one_level_deeper_once() -> None:
    config = "config: {cmd: run-x, args: [a], envs: {A: b}}"
    text = f"extensions:\n  x:\n    enabled: false\n    type: stdio\n    {config}\n".encode()
    read = parse("/h/.config/goose/config.yaml", text, "yaml")
    [server] = servers_of(read, host_of(read.path, read))
    assert server.argv == ("run-x", "a") and server.disabled and server.env == (("A", "b"),)
    assert server.command_keys == ("extensions", "x", "config", "cmd")


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("claude.json", "Claude Code"),
        ("vscode.json", "VS Code"),
        ("zed.json", "Zed"),
        ("opencode.jsonc", "opencode"),
        ("opencode2.json", "opencode"),
        ("amp.json", "Amp"),
        ("codex.toml", "Codex"),
        ("vibe.toml", "Mistral Vibe"),
        ("goose.yaml", "Goose"),
        ("continue.yaml", "Continue"),
        ("cursor.json", ""),  # several hosts write like this
        ("plain.json", ""),
    ],
)
def test_a_file_elsewhere_is_recognised_by_its_content(name: str, host: str) -> None:
    syntax: Any = {"toml": "toml", "yaml": "yaml"}.get(name.rpartition(".")[2], "jsonc")
    read = parse(f"/somewhere/{name}", (FILES / name).read_bytes(), syntax)
    found = host_by_content(read)
    assert (found.name if found else "") == host
    assert host_of(read.path, read, home=HOME, environ={}) == found


@pytest.mark.parametrize(
    ("path", "project", "own"),
    [
        ("/src/shop/.vscode/mcp.json", "/src/shop", False),
        ("/src/shop/.mcp.json", "/src/shop", False),
        ("/.mcp.json", "/", False),
        (f"{HOME}/.cursor/mcp.json", "", True),
        (f"{HOME}/shop/.cursor/mcp.json", f"{HOME}/shop", False),
        ("/home/other/.cursor/mcp.json", "/home/other", False),
        ("/src/shop/.config/Code/User/mcp.json", "", False),
        ("/etc/gemini-cli/settings.json", "", True),
        ("/src/etc/gemini-cli/settings.json", None, False),
        ("/opt/codex/config.toml", "", True),
        ("/opt/other/config.toml", None, False),
        (f"{HOME}/.aws/amazonq/cli-agents/deep/er.json", None, False),
    ],
)
def test_a_place_tells_project_and_owner(path: str, project: str | None, own: bool) -> None:
    """A folder that looks like a home is nobody's own: a cloned project can have any folder."""
    place = place_of(path, HOME, ENVIRON)
    assert (place.project if place else None) == project
    assert (place.own if place else False) == own


def test_the_files_of_this_user_and_of_a_project_are_found(tmp_path: Path) -> None:
    home, project = tmp_path / "home", tmp_path / "pro[j]ect*"
    wanted = [
        home / ".cursor/mcp.json",
        home / ".aws/amazonq/cli-agents/a.json",
        project / ".vscode/mcp.json",
        project / ".continue/mcpServers/b.yaml",
        tmp_path / "codex/config.toml",
    ]
    for path in (*wanted, home / "mcp.json", tmp_path / "proj" / ".vscode/mcp.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    (home / ".claude.json").mkdir()  # a folder of this name is none
    found = known_files({"CODEX_HOME": str(tmp_path / "codex")}, str(home), str(project))
    assert {each.path for each in found} == {str(path) for path in wanted}
    assert {each.path for each in found if not each.own} == {str(wanted[2]), str(wanted[3])}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("3", "is not an object"),
        ("{}", "has no command"),
        ('{"command": 3}', "has no 'command' to start"),
        ('{"command": "x", "args": "y"}', "has 'args' that is not a list of strings"),
        ('{"command": "x", "args": [1]}', "has 'args' that is not a list of strings"),
        ('{"command": "x", "env": []}', "has 'env' that is not an object"),
        ('{"command": "x", "env": {"A": [1]}}', "has a variable 'A' whose value is not a string"),
    ],
)
def test_an_entry_that_cannot_be_read_says_why(entry: str, said: str) -> None:
    read = parse("/x/mcp.json", f'{{"mcpServers": {{"a": {entry}}}}}'.encode(), "json")
    [server] = servers_of(read, None)
    assert said in server.fault


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"type": "stdio", "command": "x", "url": "https://e/"}, "'command' and 'url'"),
        ({"command": "x", "uri": "y"}, "'command' and 'uri'"),
        ({"type": "stdio", "command": "x", "transport": "http"}, "the transport 'http'"),
        ({"command": "x", "transportType": "sse"}, "the transportType 'sse'"),
        ({"type": "http", "command": "x", "url": "https://e/"}, "'command' and 'url'"),
        ({"type": "Stdio", "command": "x"}, "the unknown type 'Stdio'"),
        ({"type": ["http"], "command": "x"}, "the unknown type"),
        ({"type": "http", "url": "https://e/", "headersHelper": "./x.sh"}, "'headersHelper', a command that"),
        # The controls: a server that is started, and one that is not.
        ({"type": "stdio", "command": "x", "url": ""}, ""),
        ({"type": "http", "command": "", "url": "https://e/"}, "remote"),
        ({"type": "http", "url": "https://e/"}, "remote"),
    ],
)
def test_nothing_that_a_host_may_start_is_called_remote(entry: dict[str, Any], said: str) -> None:
    for host in (None, *HOSTS):
        if host is None or host.shape == "plain":
            keys = (host or GENERIC).servers[0]
            table: Any = [{"name": "a", **entry}] if host is not None and host.named_list else {"a": entry}
            read = parse("/x/mcp.json", json.dumps({keys[0]: table}).encode(), "json")
            [server] = servers_of(read, host)
            assert (server.remote, said in server.fault) == (
                (True, False) if said == "remote" else (False, True)
            )
            assert bool(server.fault) == (said not in ("", "remote"))


@pytest.mark.parametrize(
    ("mcp", "expected"),
    [
        ({"servers": {"enabled": False}, "evil": {"type": "local", "command": ["x"]}}, {"evil"}),
        (
            {"servers": {"one": {"type": "local", "command": ["x"]}}, "evil": {"command": ["y"]}},
            {"one", "evil"},
        ),
        ({"servers": {"type": "local", "command": ["x"], "evil": {"command": ["y"]}}}, {"servers", "evil"}),
        ({"servers": {"type": "local", "command": ["x"]}}, {"servers"}),
        ({"timeout": {"startup": 1}, "servers": {"one": {"command": ["x"]}}}, {"one"}),
    ],
)
def test_both_levels_of_opencode_are_read(mcp: dict[str, Any], expected: set[str]) -> None:
    read = parse("/src/shop/opencode.json", json.dumps({"mcp": mcp}).encode(), "jsonc")
    found = servers_of(read, host_of(read.path, read))
    assert {server.name for server in found} == expected
    for server in found:
        assert not server.fault and server.argv and at(read.data, server.command_keys) == list(server.argv)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("type: stdio, cmd: evil, envs: {LD_PRELOAD: /x.so}, config: {cmd: decoy}", "'cmd' and a 'config'"),
        ("type: stdio, envs: {LD_PRELOAD: /x.so}, config: {cmd: decoy}", "'envs' and a 'config'"),
        ("type: stdioo, cmd: evil", "the unknown type 'stdioo'"),
        ("type: Stdio, cmd: evil", "the unknown type 'Stdio'"),
        ("type: builtin, cmd: evil", "the unknown type 'builtin'"),
        ("type: builtin, config: {cmd: evil}", "the unknown type 'builtin'"),
        ("type: stdio, cmd: evil, uri: x", "'cmd' and 'uri'"),
        ("type: sse, config: {cmd: evil}", "the type 'sse'"),
    ],
)
def test_what_goose_may_start_is_named(entry: str, said: str) -> None:
    text = f"extensions:\n  x: {{{entry}}}\n".encode()
    read = parse("/h/.config/goose/config.yaml", text, "yaml")
    [server] = servers_of(read, GOOSE)
    assert said in server.fault and not server.remote and not server.skipped


def test_a_type_of_goose_that_nobody_knows_is_named() -> None:
    text = b"extensions:\n  x: {type: inline_python, code: pass}\n  y: {type: builtin, name: y}\n"
    read = parse("/h/.config/goose/config.yaml", text, "yaml")
    [server] = servers_of(read, GOOSE)
    assert server.name == "x" and "only Goose knows" in server.skipped


def test_variables_behind_one_that_is_no_string_are_read() -> None:
    text = b'{"mcpServers": {"a": {"command": "x", "env": {"A": [], "PATH": "/p"}}}}'
    [server] = servers_of(parse("/x/mcp.json", text, "json"), None)
    assert server.env == (("PATH", "/p"),) and "'A'" in server.fault


def test_the_documentation_has_every_host_and_every_file_of_a_project() -> None:
    text = (ROOT / "docs/hosts.md").read_text()
    for host in HOSTS:
        assert f"\n| {host.name} |" in text
        for file in (*host.files[:1], *host.project_files, *host.system_files):
            assert f"`{file}`" in text, file
        place = host.log if host.log.startswith("the ") else f"`{host.log}`"
        assert not host.log or f"\n| {host.name} | {place} |\n" in text
    assert (
        f"Configurations of {len({host.name for host in HOSTS})} MCP hosts"
        in (ROOT / "CHANGELOG.md").read_text()
    )
