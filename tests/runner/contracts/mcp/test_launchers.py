"""Commands that start a server by way of npx, uvx, docker and others: refused before anything starts."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from runner.contracts.mcp import CONTRACT
from runner.contracts.mcp.launchers import CONTAINER, FETCHES, NAMES, WINDOWS, launcher_fault
from runner.launch.command import Command, plugin_of
from sandbox.spec import Network, SandboxSpec
from tests.conftest import Caller
from tests.tables import one_case


@pytest.fixture(autouse=True)
def _ordinary_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's programs are installed elsewhere: one test is about that."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)


def fault(line: str) -> tuple[str, str, str] | None:
    found = launcher_fault(shlex.split(line))
    # What every launch asks first says the same.
    assert CONTRACT.launch_fault(plugin_of(Command(tuple(shlex.split(line)), "/"), "mcp")) == found
    return None if found is None else tuple(found)  # type: ignore[return-value]


@one_case(
    ("line", "install"),
    [
        ("npx -y @scope/server /data", "npm install --prefix ~/servers @scope/server"),
        ("npx server@1.2.3", "npm install --prefix ~/servers server@1.2.3"),
        ("npx --yes --package=@scope/server program --flag", "npm install --prefix ~/servers @scope/server"),
        ("npx -p a -p b program", "npm install --prefix ~/servers a b"),
        ("npx --registry https://npm.example server", "npm install --prefix ~/servers server"),
        ("/usr/bin/npx server", "npm install --prefix ~/servers server"),
        ("NPX.CMD server", "npm install --prefix ~/servers server"),
        ("npm exec -y -- server --x", "npm install --prefix ~/servers server"),
        ("npm --prefix /x exec --package=server -- program", "npm install --prefix ~/servers server"),
        ("npm x server", "npm install --prefix ~/servers server"),
        ("pnpm dlx server@latest", "npm install --prefix ~/servers server@latest"),
        ("pnpm --package=@s/server dlx program", "npm install --prefix ~/servers @s/server"),
        ("pnpx server", "npm install --prefix ~/servers server"),
        ("yarn dlx -q -p server program", "npm install --prefix ~/servers server"),
        ("bunx --bun server", "bun add -g server"),
        ("bun x @scope/server", "bun add -g @scope/server"),
        ("uvx server --repository /x", "uv tool install server"),
        ("uvx server@latest", "uv tool install server"),
        ("uvx server@1.2", "uv tool install server==1.2"),
        ("uvx 'server[cli]==1.2'", "uv tool install 'server[cli]==1.2'"),
        (
            "uvx --from git+https://git@example.com/a/b program",
            "uv tool install git+https://git@example.com/a/b",
        ),
        (
            "uvx --python 3.12 --with a,b --with=c --from server program",
            "uv tool install --python 3.12 --with a --with b --with c server",
        ),
        ("uvx -p 3.12 -q server", "uv tool install --python 3.12 server"),
        ("uv tool run server", "uv tool install server"),
        ("uv --cache-dir /x tool run --from server program", "uv tool install server"),
        ("pipx run server==2", "pipx install server==2"),
        ("pipx run --spec server --python python3.12 program", "pipx install --python python3.12 server"),
        ("python3 -m pipx run server", "pipx install server"),
        ("python3.12 -u -m uv tool run server", "uv tool install server"),
        ("node /usr/lib/node_modules/npm/bin/npx-cli.js -y server", "npm install --prefix ~/servers server"),
        ("uv run --with server program", "uv add server"),
        ("uv run -q --with=server x.py", "uv add server"),
        # Behind other programs.
        ("env npx server", "npm install --prefix ~/servers server"),
        ("nice npx server", "npm install --prefix ~/servers server"),
        ("nice -n 5 npx server", "npm install --prefix ~/servers server"),
        ("nice -5 npx server", "npm install --prefix ~/servers server"),
        ("timeout 5 npx server", "npm install --prefix ~/servers server"),
        ("timeout -k 1 --signal=TERM 5s uvx server", "uv tool install server"),
        ("nohup npx server", "npm install --prefix ~/servers server"),
        ("stdbuf -o0 npx server", "npm install --prefix ~/servers server"),
        ("stdbuf -o 0 -- npx server", "npm install --prefix ~/servers server"),
        ("setsid -w npx server", "npm install --prefix ~/servers server"),
        ("ionice -c 3 nice env npx server", "npm install --prefix ~/servers server"),
        ("/usr/bin/env -i A=1 -u B npx -y server", "npm install --prefix ~/servers server"),
        ("env -S 'A=1 npx server' more", "npm install --prefix ~/servers server"),
        ("env --split-string='npx server'", "npm install --prefix ~/servers server"),
        ("sh -c 'npx -y server'", "npm install --prefix ~/servers server"),
        ("bash -lc 'cd /x && A=1 exec uvx server; true'", "uv tool install server"),
        ("bash -o pipefail -c 'true|pipx run server'", "pipx install server"),
        ("sh -c 'env sh -c \"npx server\"'", "npm install --prefix ~/servers server"),
        # The whole line in `command`, as some entries have it.
        ("'npx -y server@0.1.2'", "npm install --prefix ~/servers server@0.1.2"),
        ("'npx -y' server", "npm install --prefix ~/servers server"),
    ],
)
def test_a_launcher_is_refused_with_the_command_that_installs(line: str, install: str) -> None:
    found = fault(line)
    assert found is not None
    cause, message, hint = found
    assert cause == FETCHES
    assert " needs the network at every start, so it cannot start " in message
    assert f"once: {install}; then give the" in hint
    assert "\n" not in message + hint


@pytest.mark.parametrize(
    "line", ["npx --offline x", "npx --no-install x", "uvx --offline x", "bunx --no-install x"]
)
def test_a_launcher_that_uses_its_cache(line: str) -> None:
    found = fault(line)
    assert found is not None and "from a cache in the home directory, which is not in the cage" in found[1]


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("uvx --from server program", "'command -v program' prints it"),
        ("npx server@1.2", "~/servers/node_modules/.bin/server"),
        ("pipx run server==2", "'command -v server' prints it"),
        ("npx @scope/server", "it is in ~/servers/node_modules/.bin"),
        ("bunx @scope/server", "bun pm bin -g"),
        ("uvx git+https://example.com/x", "uv tool dir --bin"),
    ],
)
def test_where_the_program_will_be(line: str, where: str) -> None:
    found = fault(line)
    assert found is not None and where in found[2]


def test_root_installs_where_plugins_can_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not below /root, which no policy can allow."""
    monkeypatch.setattr("os.geteuid", lambda: 0)
    for line in (
        "npx @scope/server",
        "uvx server",
        "pipx run server",
        "bunx server",
        "uvx git+https://e.x/y",
    ):
        found = fault(line)
        assert found is not None and ("/opt/" in found[2]) and "~" not in found[2], line
    assert "UV_TOOL_BIN_DIR=/usr/local/bin uv tool install server; then" in (fault("uvx server") or "")[2]


@pytest.mark.parametrize(
    "line",
    [
        "npx",
        "npx -y",
        "uvx --from",
        "npx --package=--global x",
        "npx 'a\nb'",
        "npx 'a\x1b[2J'",
        f"npx {'x' * 300}",
        "npx -p 'a\x07' x",
        "uvx --with 'a\u202eb' x",
    ],
)
def test_words_that_no_command_should_be_made_of(line: str) -> None:
    found = fault(line)
    assert found is not None
    assert " PACKAGE" in found[2] and found[1].isprintable() and found[2].isprintable()


def test_a_command_that_a_person_copies_is_quoted() -> None:
    found = fault("npx 'x; rm -rf ~' '$(id)'")
    assert found is not None and "npm install --prefix ~/servers 'x; rm -rf ~';" in found[2]


@pytest.mark.parametrize(
    "line",
    [
        "docker run -i --rm mcp/server",
        "docker -H unix:///x --context c run x",
        "/usr/bin/docker compose run x",
        "docker mcp gateway run",
        "podman run -i x",
        "sh -c 'docker run x'",
        "env A=1 docker exec -i x y",
    ],
)
def test_a_container_cannot_be_in_a_cage(line: str) -> None:
    found = fault(line)
    assert found is not None and found[0] == CONTAINER
    assert "starts a container already, and a cage cannot hold it" in found[1]
    assert ("socket" in found[1]) is ("docker" in line)


@pytest.mark.parametrize("line", ["cmd /c npx -y server", "cmd.exe /d /s /c server", "powershell -c server"])
def test_an_entry_for_windows(line: str) -> None:
    found = fault(line)
    assert found is not None and found[0] == WINDOWS and "written for Windows" in found[1]
    assert ("npm install --prefix ~/servers server" if "npx" in line else "without") in found[2]


@pytest.mark.parametrize(
    "line",
    [
        "node server.js",
        "python3 -m server",
        "python3 -m pipx list",
        "python3 -c 'npx x'",
        "npm start",
        "npm run server",
        "npm install x",
        "yarn start",
        "pnpm exec server",
        "bun run index.ts",
        "bun index.ts",
        "uv --directory /project run server.py",  # works offline in a project that is installed
        "uv run server.py --with x",
        "uv tool list",
        "uv pip install x",
        "pipx list",
        "docker ps",
        "docker --version",
        "sh server.sh npx x",
        "sh -c 'echo npx x'",
        "sh -c 'echo \"unbalanced'",
        "sh -c",
        "env",
        "env A=1",
        "nice",
        "timeout npx",
        "timeout 5 python3 server.py npx",
        "/opt/npx-like/server",
        "npxx server",
        "server npx -y x",
        "'/opt/my server/run'",
        "''",
    ],
)
def test_programs_of_their_own(line: str) -> None:
    assert fault(line) is None


def test_no_arguments_at_all() -> None:
    assert launcher_fault(()) is None


def test_wrappers_without_end() -> None:
    assert launcher_fault(("env",) * 500 + ("npx", "x")) is None  # nobody's command line
    assert launcher_fault(("sh", "-c", "npx x\n" * 100_000)) is not None


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_name_is_asked_about_at_a_launch(name: str) -> None:
    """The contract itself sorts out most programs by name, so as not to import the table."""
    command = Command((f"/usr/bin/{name}", "-c", "npx x"), "/")
    assert CONTRACT.launch_fault(plugin_of(command, "mcp")) == launcher_fault(command.argv)


@pytest.mark.parametrize(
    ("network", "refused"),
    [
        (None, True),
        (Network("none"), True),
        (Network("allowlist", ("api.example.com:443",)), True),
        (Network("allowlist", ("api.example.com:443", "registry.npmjs.org:443")), False),
        (Network("host"), False),
    ],
)
def test_a_launcher_that_may_reach_its_registry(network: Network | None, refused: bool) -> None:
    command = Command(("npx", "-y", "x"), "/", spec=SandboxSpec(network=network))
    assert (CONTRACT.launch_fault(plugin_of(command, "mcp")) is not None) is refused
    container = Command(("docker", "run", "x"), "/", spec=SandboxSpec(network=network))
    assert CONTRACT.launch_fault(plugin_of(container, "mcp")) is not None


def test_every_verb_refuses_before_anything_starts(runner_as: Caller, tmp_path: Path) -> None:
    manifest = runner_as.home / "mcp.json"
    entries = {"fetched": {"command": "npx", "args": ["-y", "server"]}, "own": {"command": "true"}}
    manifest.write_text(json.dumps({"mcpServers": entries}, indent=1))
    runner_as.give(manifest)
    said = "npx needs the network at every start, so it cannot start server in a cage"
    server = (str(manifest), "--server", "fetched")
    for verb, code in ((("exec", *server), 126), (("run", "--", "npx", "-y", "server"), 126)):
        done = runner_as(*verb)
        assert done.returncode == code
        assert done.stderr.splitlines()[0] == f"runner: launch_failed: {said}"
        assert "npm install --prefix " in done.stderr and len(done.stderr.splitlines()) == 2
    for verb in (("call", *server, "tool"), ("tools", *server), ("explain", *server)):
        done = runner_as(*verb)
        assert done.returncode == 10
        assert said in done.stderr + done.stdout and "npm install --prefix " in done.stderr + done.stdout
    checked = runner_as("check", manifest)
    assert checked.returncode == 0
    assert f"{manifest}:4:4: " in checked.stdout and f"warning: {FETCHES}: {said}" in checked.stdout
    assert "0 errors, 1 warning" in checked.stdout
