"""What a diff shows: structure and command lines, and nothing that may be a secret."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.contracts.mcp.wrap.changes import apply_steps
from runner.contracts.mcp.wrap.configuration import Configuration, configuration
from runner.contracts.mcp.wrap.diff import diff
from runner.contracts.mcp.wrap.redact import shown_line, shown_words
from runner.contracts.mcp.wrap.steps import wrap_step
from tests.conftest import Caller
from tests.tables import one_case

Write = Callable[..., Path]
X = "s3cr3t-value"


@pytest.mark.parametrize(
    "words",
    [
        ("--header", f"Authorization: Bearer {X}"),
        ("--header", "Authorization: Bearer", X),
        ("--header", f"X-Custom: basic {X}"),
        ("-H", f"X-Api-Key: {X}"),
        (f"API_KEY={X}",),
        ("-e", f"TOKEN={X}"),
        (f"-eGITHUB_PAT={X}",),
        (f"--env=DB_PASSWORD={X}",),
        ("--pat", X),
        ("--github-pat", X),
        ("--api-key", f"-{X}"),
        (f"--api-key={X}",),
        ("--apiKey", X),
        ("--dsn", f"user:{X}@h"),
        (f"user:{X}@h",),
        (f"postgres://u:a/{X}@h/db",),
        (f"postgres://u:a@{X}@h/db",),
        (f"https://{X}@example.com/x",),
        (f"https://example.com/?api_key={X}&a=b",),
        (f'{{"apiKey": "{X}"}}',),
        ("-u", f"me:{X}"),
        (f"ghp_{X.replace('-', '_')}",),
        ("x" * 3000 + X,),
    ],
)
def test_no_secret_of_a_command_line_is_shown(words: tuple[str, ...]) -> None:
    shown = shown_line(("server", *words, "last"))
    assert "s3cr3t" not in shown
    assert shown.startswith("server ") and shown.endswith(" last")


def test_other_words_are_shown() -> None:
    words = ["run", "--env", "TOKEN", "--", "node", "--path", "/data", "@org/server@1.2", "--port=80"]
    words += [
        '{"file":"/home/me/.cursor/mcp.json"}',
        "https://example.com/mcp",
        "--pattern",
        "*.py",
        "-u",
        "x.py",
    ]
    assert shown_words(words) == words


COMMENTED = {
    ".vscode/mcp.json": """{
  // s3cr3t one
  "servers": { /* s3cr3t
     two */
    "tool": { // s3cr3t three
      "note": "s3cr3t four", // s3cr3t five
      "command": "/opt/tool", /* s3cr3t six */
      "args": ["-v", // s3cr3t seven
        "--x"],
      "env": {"A": "s3cr3t eight"}
    }
  }
}
""",
    ".codex/config.toml": """# s3cr3t one
[mcp_servers.tool] # s3cr3t two
note = "s3cr3t four" # s3cr3t five
# it's "s3cr3t
command = "/opt/tool" # s3cr3t six
args = ["-v", # s3cr3t seven
  "--x"]
env = { A = "s3cr3t" }
""",
    ".continue/config.yaml": """# s3cr3t one
mcpServers:  # s3cr3t two
  - name: tool # it's s3cr3t three
    note: s3cr3t four # s3cr3t five
    command: /opt/tool # it's s3cr3t six
    args: # s3cr3t
      - -v # s3cr3t seven
      - --x
    env: # s3cr3t
      A: s3cr3t
""",
}


@one_case("name", COMMENTED)
def test_comments_and_other_values_are_not_shown(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write, name: str
) -> None:
    path = write_file(plugin_dir / "project" / name, COMMENTED[name])
    runner_as_user.give(plugin_dir / "project")
    for options in (("--dry-run",), ("--yes",), ("--undo", "--yes")):
        done = runner_as_user("wrap", path, *options)
        assert done.returncode == 0, done.stderr
        assert "/opt/tool" in done.stdout and "--wrapped" in done.stdout
        assert "s3cr3t" not in done.stdout + done.stderr
    assert path.read_text() == COMMENTED[name]


def test_no_secret_of_a_command_line_is_in_the_diff(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    args = ["--header", f"Authorization: Bearer {X}", f"API_KEY={X}", "--pat", X, "--visible"]
    text = json.dumps({"mcpServers": {"tool": {"command": "/opt/tool", "args": args}}}, indent=1)
    path = write_file(plugin_dir / "mcp.json", text)
    done = runner_as_user("wrap", path, "--dry-run")
    assert done.returncode == 0 and "/opt/tool" in done.stdout
    assert X not in done.stdout


@pytest.mark.parametrize("servers", [1, 2, 7, 300])
@pytest.mark.parametrize("indent", [None, 2])
def test_the_diff_leads_from_one_text_to_the_other(servers: int, indent: int | None) -> None:
    """Its hunks say which lines they replace: replaced one by one, they give the new text."""

    def read(raw: bytes) -> Configuration:
        return configuration("/home/me/.cursor/mcp.json", raw, "/home/me", {})

    entries = {f"s{n}": {"command": "/opt/x", "args": ["a", f"b{n}"][: n % 3]} for n in range(servers)}
    before = read(json.dumps({"mcpServers": entries}, indent=indent).encode())
    steps = [wrap_step(before, each, "/opt/runner") for each in before.servers if each.name != "s1"]
    after = read(apply_steps(before, steps, "/opt/runner")[0])
    old, new = before.raw.decode().split("\n"), after.raw.decode().split("\n")
    lines = diff(before, after)
    assert [line[:4] for line in lines[:2]] == ["--- ", "+++ "]
    result, at = [], 0
    if indent is None:  # one line, which may be too long to be shown
        assert [line[0] for line in lines[2:]] == ["@", "-", "+"]
        return
    for line in lines[2:]:
        if line.startswith("@@"):
            first = int(line.split()[1].partition(",")[0][1:]) - 1
            result += old[at:first]
            at = first
        elif line[0] in "- ":
            assert line[1:] == old[at]
            result += [old[at]] if line[0] == " " else []
            at += 1
        else:
            result.append(line[1:])
    assert result + old[at:] == new
