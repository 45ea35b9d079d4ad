"""The names of an entry's variables, however they are written: each gets the prefix, or the entry is left."""

from __future__ import annotations

import json

import pytest

from runner.contracts.mcp.wrap.changes import apply_steps
from runner.contracts.mcp.wrap.configuration import Configuration, configuration
from runner.contracts.mcp.wrap.steps import is_safe, undo_step, wrap_step

HOME = "/home/user"
RUNNER = "/opt/runner/bin/runner"
CODEX, GOOSE, VSCODE, ANY = (
    ".codex/config.toml",
    ".config/goose/config.yaml",
    ".vscode/mcp.json",
    "mcp.json",
)


def read(path: str, text: str | bytes) -> Configuration:
    raw = text if isinstance(text, bytes) else text.encode()
    return configuration(f"{HOME}/project/{path}" if path == VSCODE else f"{HOME}/{path}", raw, HOME, {})


def wrap(config: Configuration) -> tuple[Configuration, str]:
    """The file after it, and why its entry was left."""
    [server] = config.servers
    raw, [step] = apply_steps(config, [wrap_step(config, server, RUNNER)], RUNNER)
    return config._replace(raw=raw) if step.does == "leave" else read(_place(config), raw), step.reason


def _place(config: Configuration) -> str:
    return config.path.removeprefix(f"{HOME}/").removeprefix("project/")


TEXTS = {
    ANY: '{"mcpServers": {"a": {"command": "/x", %s}}}',
    VSCODE: '{"servers": {"a": {"command": "/x", %s}}}',
    CODEX: '[mcp_servers.a]\ncommand = "/x"\n%s\n',
    GOOSE: "x: &x {A: v}\nextensions:\n  a:\n    type: stdio\n    cmd: /x\n    %s\n",
}
# The file, a part of its entry, and a part of what is in it afterwards.
WRITTEN: list[tuple[str, str, str]] = [
    (ANY, r'"env": {"LD\u005fPRELOAD": "v"}', r'"PLUGIN_ENV_LD\u005fPRELOAD"'),
    (ANY, '"env": {"PLUGIN_ENV_A": "v", "A": "w"}', '"PLUGIN_ENV_PLUGIN_ENV_A"'),
    (ANY, '"env": {"BASH_FUNC_x%%": "() { :; }"}', '"PLUGIN_ENV_BASH_FUNC_x%%"'),
    (VSCODE, '"env": {\n // c\n "A" /* d */ : null, "B": 1,}', '"PLUGIN_ENV_A" /* d */ : null'),
    (VSCODE, r'"envFile": "${workspaceFolder}\/.env"', '"envFile": "/dev/null"'),
    (CODEX, '[mcp_servers.a.env]\nA = "v"\n"B" = "w"\n\'C\' = "x"', "'PLUGIN_ENV_C' = "),
    (CODEX, 'env . "\\u0041" = "v" # c\nenv.B = "w"', 'env . "PLUGIN_ENV_\\u0041" = '),
    (CODEX, 'env = { A = "v" , \'B\'="" }', "'PLUGIN_ENV_B'=\"\""),
    (GOOSE, "envs: {A: v, 'B': w, \"\\x43\": x}", '"PLUGIN_ENV_\\x43": x'),
    (GOOSE, "envs:\n      A: v # c\n      'B' : w", "'PLUGIN_ENV_B' : w"),
]


@pytest.mark.parametrize(("path", "text", "wanted"), WRITTEN)
def test_each_name_gets_the_prefix_where_it_stands(path: str, text: str, wanted: str) -> None:
    text = TEXTS[path] % text
    after, left = wrap(read(path, text))
    assert not left
    assert wanted in after.raw.decode()
    [server] = after.servers
    assert is_safe(after, server)
    assert wrap(after)[0].raw == after.raw
    assert apply_steps(after, [undo_step(server)], "")[0] == text.encode()


LEFT: list[tuple[str, str, str]] = [
    (ANY, '"env": {"LD_PRELOAD=/e.so:": "v"}', "is the name of none"),
    (ANY, '"env": {"": "v"}', "is the name of none"),
    (ANY, '"env": ["LD_PRELOAD=/e.so"]', "not an object"),
    (ANY, '"envFile": "/e"', "not known what"),
    (VSCODE, '"envFile": ["/e"]', "not known what"),
    (VSCODE, '"env_file": "/e"', "not known what"),
    (CODEX, 'env = { A = "v", B.C = "w" }', "is not a string"),
    (CODEX, 'env_vars = ["TOKEN", "LD_PRELOAD"]', "pass on 'LD_PRELOAD'"),
    (CODEX, 'env_vars = [{name = "BASH_ENV"}]', "pass on 'BASH_ENV'"),
    (GOOSE, "envs: *x", "it is an alias"),
    (GOOSE, "envs: &e {A: v}\n    more: *e", "alter more"),
    (GOOSE, "envs: {&k A: v}", "cannot be edited"),
    (GOOSE, "envs: {!!str A: v}", "cannot be edited"),
]


@pytest.mark.parametrize(("path", "text", "why"), LEFT)
def test_an_entry_whose_variables_cannot_be_kept_from_the_runner_is_left(
    path: str, text: str, why: str
) -> None:
    text = TEXTS[path] % text
    after, left = wrap(read(path, text))
    assert why in left
    assert after.raw == text.encode()


@pytest.mark.parametrize("text", ["null", "{}"])
def test_no_variables(text: str) -> None:
    raw = f'{{"mcpServers": {{"a": {{"command": "/x", "env": {text}}}}}}}'
    after, left = wrap(read(ANY, raw))
    assert not left
    assert apply_steps(after, [undo_step(after.servers[0])], "")[0] == raw.encode()


def test_two_of_one_name_are_left_to_a_person() -> None:
    after, _ = wrap(read(ANY, '{"mcpServers": {"a": {"command": "/x", "env": {"A": "v"}}}}'))
    both = read(ANY, after.raw.replace(b'"PLUGIN_ENV_A"', b'"A": "other", "PLUGIN_ENV_A"'))
    same, why = wrap(both)
    assert "there is 'A' already" in why and same.raw == both.raw
    undone, [step] = apply_steps(both, [undo_step(both.servers[0])], "")
    assert (step.does, undone) == ("leave", both.raw)


def test_a_name_that_was_written_anew_is_written_plainly() -> None:
    """A host may write the file in its own way: then undo restores the name, and not its spelling."""
    text = r'{"mcpServers": {"a": {"command": "/x", "args": [], "env": {"\u0041": "v"}}}}'
    after, _ = wrap(read(ANY, text))
    anew = read(ANY, after.raw.replace(rb'"PLUGIN_ENV_\u0041"', rb'"PLUGIN\u005fENV_A"'))
    undone = apply_steps(anew, [undo_step(anew.servers[0])], "")[0]
    assert json.loads(undone) == json.loads(text)


def test_a_name_that_acts_at_the_start_and_is_passed_on_since() -> None:
    after, _ = wrap(read(CODEX, TEXTS[CODEX] % 'env_vars = ["TOKEN"]'))
    grown = read(CODEX, after.raw.replace(b'env_vars = ["TOKEN"', b'env_vars = ["TOKEN", "LD_PRELOAD"'))
    step = wrap_step(grown, grown.servers[0], RUNNER)
    assert (step.does, step.acting) == ("leave", ("LD_PRELOAD",))
    assert "these act on the runner itself: 'LD_PRELOAD'" in step.unsafe[0]
    assert "take it out of the entry" in step.reason
