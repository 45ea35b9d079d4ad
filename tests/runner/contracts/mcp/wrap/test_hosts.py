"""Wrap and undo on files of real hosts: byte for byte what it was, however the file is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.contracts.configurations import PLUGIN_PREFIX
from runner.contracts.mcp.hosts.wrapping import plugin_env, plugin_env_file, record_of, split_wrapped
from runner.contracts.mcp.wrap.changes import apply_steps
from runner.contracts.mcp.wrap.configuration import Configuration, configuration
from runner.contracts.mcp.wrap.diff import diff
from runner.contracts.mcp.wrap.steps import Step, is_safe, plugin_words, undo_step, wrap_step
from tests.tables import one_case

CONFIGS = Path(__file__).parent / "configs"
HOME = "/home/user"
RUNNER = "/opt/runner/bin/runner"

# The file, where its host keeps it, the host, and the servers that are wrapped.
HOSTS: list[tuple[str, str, str, tuple[str, ...]]] = [
    (
        "claude_desktop_config.json",
        ".config/Claude/claude_desktop_config.json",
        "Claude Desktop",
        ("filesystem", "memory", "time"),
    ),
    ("claude.json", ".claude.json", "Claude Code", ("github", "db", "/home/user/work/api:db")),
    ("cursor.json", ".cursor/mcp.json", "Cursor", ("files",)),
    ("vscode.json", ".config/Code/User/mcp.json", "VS Code", ("Perplexity", "fetch")),
    ("zed.json", ".config/zed/settings.json", "Zed", ("old-form", "older-form", "new-form")),
    ("codex.toml", ".codex/config.toml", "Codex", ("context", "dotted.name", "inline", "bare", "keyed")),
    ("goose.yaml", ".config/goose/config.yaml", "Goose", ("github", "tutor", "notes", "empty")),
    ("continue.yaml", ".continue/config.yaml", "Continue", ("SQLite MCP", "First", "With slash/in name")),
    ("opencode.jsonc", ".config/opencode/opencode.jsonc", "opencode", ("everything", "multi", "one")),
    ("gemini.json", ".gemini/settings.json", "Gemini CLI", ("pythonTools", "nodeServer")),
]

WRITINGS: dict[str, Callable[[bytes], bytes]] = {
    "as it is": lambda raw: raw,
    "CRLF": lambda raw: raw.replace(b"\n", b"\r\n"),
    "no line end": lambda raw: raw.rstrip(b"\n"),
    "byte order mark": lambda raw: b"\xef\xbb\xbf" + raw,
    "blank lines": lambda raw: raw.replace(b"\n", b"\n\n"),
}


def read(path: str, raw: bytes) -> Configuration:
    return configuration(f"{HOME}/{path}", raw, HOME, {})


def wrap(config: Configuration, program: str = RUNNER) -> tuple[Configuration, tuple[Step, ...]]:
    raw, steps = apply_steps(config, [wrap_step(config, each, program) for each in config.servers], program)
    return configuration(config.path, raw, HOME, {}), steps


def undo(config: Configuration) -> bytes:
    return apply_steps(config, [undo_step(each) for each in config.servers], "")[0]


@one_case("writing", WRITINGS)
@one_case(("file", "path", "host", "wrapped"), HOSTS, ids=[each[2] for each in HOSTS])
def test_undo_restores_every_byte(
    file: str, path: str, host: str, wrapped: tuple[str, ...], writing: str
) -> None:
    raw = WRITINGS[writing]((CONFIGS / file).read_bytes())
    before = read(path, raw)
    after, steps = wrap(before)
    assert before.host_name == host
    assert tuple(sorted(step.server.label for step in steps if step.does == "wrap")) == tuple(sorted(wrapped))
    for old, new in zip(before.servers, after.servers, strict=True):
        found = split_wrapped(new.argv)
        if old.label not in wrapped:
            assert new == old
            continue
        assert found is not None
        assert found.program == RUNNER
        assert found.argv == old.argv
        assert record_of(found.options)["file"] == before.path
        assert plugin_words(after, new) == plugin_words(before, old)
        assert is_safe(after, new)
        assert new._replace(argv=old.argv, args_keys=old.args_keys, env=old.env, env_file=old.env_file) == old
    assert after.raw.count(b"\r\n") == (after.raw.count(b"\n") if writing == "CRLF" else 0)
    assert undo(after) == raw


@pytest.mark.parametrize(("file", "path", "host", "wrapped"), HOSTS, ids=[each[2] for each in HOSTS])
def test_nothing_but_command_lines_and_names_changes(
    file: str, path: str, host: str, wrapped: tuple[str, ...]
) -> None:
    before = read(path, (CONFIGS / file).read_bytes())
    after, _ = wrap(before)
    assert without_argv(before) == without_argv(after)
    # And every line that stays is a line of the file.
    old, new = (each.raw.decode().replace(PLUGIN_PREFIX, "").splitlines() for each in (before, after))
    assert len([line for line in old if line not in new]) <= 2 * len(wrapped)


def without_argv(config: Configuration) -> object:
    data = json.loads(json.dumps(config.document.data))
    for server in config.servers:
        for keys in (server.args_keys, server.command_keys):
            around = data
            for key in keys[:-1] if keys is not None else ():
                around = around[key]
            if keys is not None:
                around.pop(keys[-1], None)
        around = data
        for key in server.keys:
            around = around[key]
        if server.env_file:
            around["envFile"] = plugin_env_file(server)
        around = data
        for key in server.env_keys or ():
            around = around[key]
        for name in list(around) if server.env_keys else ():
            around[name.removeprefix(PLUGIN_PREFIX)] = around.pop(name)
    return data


@pytest.mark.parametrize(("file", "path", "host", "wrapped"), HOSTS, ids=[each[2] for each in HOSTS])
def test_a_second_time_changes_nothing(file: str, path: str, host: str, wrapped: tuple[str, ...]) -> None:
    after, _ = wrap(read(path, (CONFIGS / file).read_bytes()))
    again, steps = wrap(after)
    assert again.raw == after.raw
    assert all(step.reason == "is wrapped already" for step in steps if step.server.label in wrapped)


@pytest.mark.parametrize(("file", "path", "host", "wrapped"), HOSTS, ids=[each[2] for each in HOSTS])
def test_the_diff_shows_no_secret(file: str, path: str, host: str, wrapped: tuple[str, ...]) -> None:
    before = read(path, (CONFIGS / file).read_bytes())
    shown = "\n".join(diff(before, wrap(before)[0]))
    assert RUNNER in shown
    for secret in ("ghp_", "hunter2", "tvly-1", "memory.jsonl", "API_KEY}", "user@example.com", "secrets."):
        assert secret not in shown


def test_environment_of_each_host() -> None:
    wanted = {
        "claude_desktop_config.json": {"memory": ["MEMORY_FILE_PATH"], "time": []},
        "vscode.json": {"Perplexity": ["PERPLEXITY_API_KEY"]},
        "zed.json": {"old-form": ["TOKEN"]},
        "codex.toml": {"context": ["MY_TOKEN", "HTTPS_PROXY", "AWS_PROFILE"], "inline": ["A"]},
        "goose.yaml": {"github": ["GITHUB_HOST", "GITHUB_PERSONAL_ACCESS_TOKEN"]},
        "continue.yaml": {"SQLite MCP": ["TOKEN"]},
        "opencode.jsonc": {"everything": ["MY_ENV_VAR"]},
        "gemini.json": {"pythonTools": ["DATABASE_URL", "API_KEY"]},
    }
    for file, path, _, _ in HOSTS:
        after, _ = wrap(read(path, (CONFIGS / file).read_bytes()))
        for name, variables in wanted.get(file, {}).items():
            server = next(each for each in after.servers if each.name == name)
            argv = server.argv
            passed = [argv[i + 1] for i, word in enumerate(argv) if word == "--env"]
            assert [*(each[1] for each in plugin_env(server)), *passed] == variables
            assert tuple(passed) == server.passed


def test_a_name_that_run_would_refuse() -> None:
    after, _ = wrap(read(".continue/config.yaml", (CONFIGS / "continue.yaml").read_bytes()))
    argv = after.servers[2].argv
    assert argv[argv.index("--name") + 1] == "With slash%2Fin name"


def test_what_cannot_be_caged_is_named() -> None:
    reasons = {
        step.server.label: step.reason
        for file, path, _, _ in HOSTS
        for step in wrap(read(path, (CONFIGS / file).read_bytes()))[1]
        if step.does == "leave"
    }
    assert reasons["github"] == "needs ghcr.io/github/github-mcp-server:latest, which is not installed"
    assert "over the network" in reasons["sentry"]
    assert "whole command line in its command" in reasons["tavily"]  # npx, too
    assert "sandboxEnabled" in reasons["boxed"]
    assert "belongs to an extension" in reasons["mcp-server-context7"]


def test_a_command_line_in_the_command_is_left() -> None:
    raw = b'{"mcpServers": {"a": {"command": "my-server --stdio"}}}'
    _, steps = wrap(read(".cursor/mcp.json", raw))
    assert "a whole command line in its command" in steps[0].reason


def test_a_disabled_entry_is_wrapped_and_said_to_be_off() -> None:
    _, steps = wrap(read(".config/zed/settings.json", (CONFIGS / "zed.json").read_bytes()))
    notes = {step.server.name: step.notes for step in steps}
    assert "switched off" in notes["new-form"][0]
    assert notes["old-form"] == ()


def test_no_host_finds_a_variable_in_what_undo_needs() -> None:
    raw = b'{"mcpServers": {"a": {"command": "\\u0024{X}/\\/y"}}}'
    before = configuration("/home/user/${workspaceFolder}/$HOME/{env:X}/mcp.json", raw, HOME, {})
    after, _ = wrap(before)
    found = split_wrapped(after.servers[0].argv)
    assert found is not None
    record = found.options[1]
    assert "$" not in record
    assert "{env" not in record
    assert record_of(found.options)["file"] == before.path
    assert undo(after) == raw


def test_undo_after_other_edits() -> None:
    raw = b'{\n  "mcpServers": {\n    "a": {\n      "command": "x"\n    }\n  }\n}\n'
    after, _ = wrap(read(".cursor/mcp.json", raw))
    argv = after.servers[0].argv
    # The host wrote the file anew, and its user added an option, an argument and a variable.
    new = [*argv[1:5], "a", "--read", "/data", *argv[6:], "--more"]
    entry = {"env": {"A": "1"}, "args": new, "command": argv[0]}
    text = json.dumps({"mcpServers": {"a": entry}}, indent=4).encode()
    undone = json.loads(undo(read(".cursor/mcp.json", text)))
    assert undone == {"mcpServers": {"a": {"env": {"A": "1"}, "args": ["--more"], "command": "x"}}}


def test_undo_after_the_host_wrote_the_file_anew() -> None:
    for args in (None, [], ["-v"]):
        entry = {"command": "x", "args": args, "env": {}} if args is not None else {"command": "x"}
        raw = json.dumps({"mcpServers": {"a": entry}}).encode()
        after, _ = wrap(read(".cursor/mcp.json", raw))
        anew = json.dumps(json.loads(after.raw), indent=2, sort_keys=True).encode()
        undone = json.loads(undo(read(".cursor/mcp.json", anew)))
        assert undone == json.loads(raw)


@pytest.mark.parametrize(
    ("host", "old", "new"),
    [
        ("Zed", b'TOKEN": "t"', b'TOKEN": "t", "TOKEN2": "u"'),
        ("Codex", b'MY_TOKEN" = "abc"', b'MY_TOKEN" = "abc"\nTOKEN2 = "u"'),
        ("Codex", b'env_vars = ["HTTPS_PROXY"', b'env_vars = ["TOKEN2"'),
        ("Goose", b"PLUGIN_ENV_GITHUB_HOST: https://", b"TOKEN2: https://"),
        ("Continue", b"PLUGIN_ENV_TOKEN: ${{", b"TOKEN2: ${{"),
        ("opencode", b'"PLUGIN_ENV_MY_ENV_VAR": "', b'"TOKEN2": "'),
        ("Gemini CLI", b'"PLUGIN_ENV_API_KEY": "', b'"TOKEN2": "'),
    ],
)
def test_new_variables_of_a_wrapped_entry_get_the_prefix(host: str, old: bytes, new: bytes) -> None:
    file, path, _, wrapped = next(each for each in HOSTS if each[2] == host)
    raw = (CONFIGS / file).read_bytes()
    after, _ = wrap(read(path, raw))
    assert after.raw.count(old) == 1
    grown, steps = wrap(read(path, after.raw.replace(old, new)))
    assert [(*step.acting, *step.added) for step in steps if step.does == "rewrap"] == [("TOKEN2",)]
    _, again = wrap(grown)
    assert {step.does for step in again if step.server.label in wrapped} == {"leave"}
    assert undo(grown) == raw.replace(old.replace(b"PLUGIN_ENV_", b""), new)


def test_an_entry_that_cannot_be_edited_is_left() -> None:
    raw = b"mcpServers:\n- name: a\n  command: &c x\n- name: b\n  command: y\n"
    after, steps = wrap(read(".continue/config.yaml", raw))
    assert [step.does for step in steps] == ["leave", "wrap"]
    assert "line 3" in steps[0].reason
    assert undo(after) == raw


def test_a_live_file_may_be_large() -> None:
    """Claude Code keeps the history of every project there: more than a manifest may have."""
    said = [{"display": "x" * 30, "pastedContents": {}}] * 100
    projects = {f"/home/user/{n}": {"history": said, "mcpServers": {}} for n in range(110)}
    data = {"projects": projects, "mcpServers": {"a": {"command": "/opt/a"}}}
    raw = json.dumps(data, indent=1).encode()
    after, steps = wrap(read(".claude.json", raw))
    assert [step.does for step in steps] == ["wrap"]
    assert undo(after) == raw


def test_what_only_looks_wrapped_is_told() -> None:
    """A project that was cloned brings an entry along."""
    config = read(".cursor/mcp.json", b'{"mcpServers": {"a": {"command": "/opt/a"}}}')
    after, _ = wrap(config)
    own, _ = wrap(after, RUNNER)
    assert own.raw == after.raw

    def reason(old: bytes, new: bytes, path: str = ".cursor/mcp.json", program: str = RUNNER) -> str:
        changed = read(path, after.raw.replace(old, new))
        step = wrap_step(changed, changed.servers[0], program)
        return "; ".join((step.reason, *step.unsafe))

    assert reason(b"", b"") == "is wrapped already"
    assert "another program: '/tmp/evil/runner'" in reason(
        RUNNER.encode(), b"/tmp/evil/runner", program="/bin/sh"
    )
    assert "for another configuration" in reason(b"", b"", path=".gemini/settings.json")
    granted = reason(b'"--name"', b'"--read", "/", "--env", "A=b", "--name"')
    assert "it does not start with options of its own: --read / --env A=b" in granted
    assert "another program" in reason(b"", b"", program="")  # nobody knows which runner this is
    twice = reason(b'"--name"', b'"--wrapped", "{}", "--name"')
    assert "wrapped already" not in twice and "by options of its own: --wrapped" in twice
    # No long value hides the name of an option.
    long = b'"--env", "A=' + b"a" * 500 + b'", "--policy", "/p", "--name"'
    assert "options of its own: --env --policy (in full: " in reason(b'"--name"', long)
    # A limit can only be lowered.
    assert reason(b'"--name"', b'"--memory", "1G", "--name"').startswith("is wrapped already; it has options")


def test_a_command_that_undo_would_write_otherwise_is_written_plainly() -> None:
    raw = b'{"mcpServers": {"a": {"command": "\\/opt\\/a"}}}'
    after, _ = wrap(read(".cursor/mcp.json", raw))
    assert undo(after) == raw
    # Somebody changed the command behind the --: what --wrapped remembers says something else now.
    other = after.raw.replace(b'"/opt/a"', b'"/opt/b"')
    assert other != after.raw
    assert undo(read(".cursor/mcp.json", other)) == b'{"mcpServers": {"a": {"command": "/opt/b"}}}'
