"""Commands that start a server by way of npx, uvx, docker and others: refused before anything starts."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from runner.contracts.mcp import CONTRACT
from runner.contracts.mcp.launchers import (
    CONTAINER,
    FETCHES,
    NAMES,
    WINDOWS,
    container_fault,
    launch_of,
    launcher_fault,
)
from runner.install.image_reference import NOT_INSTALLED
from runner.launch.command import Command
from runner.launch.read import plugin_of
from sandbox.spec import Network, SandboxSpec
from tests.conftest import Caller
from tests.tables import check_rows, one_case


def fault(line: str) -> tuple[str, str, str] | None:
    found = launcher_fault(shlex.split(line))
    # What every launch asks first says the same.
    assert CONTRACT.launch_fault(plugin_of(Command(tuple(shlex.split(line)), "/"), "mcp")) == found
    return None if found is None else tuple(found)  # type: ignore[return-value]


@one_case(
    ("line", "command"),
    [
        ("npx -y @scope/server /data", "npx -y @scope/server"),
        ("npx server@1.2.3", "npx -y server@1.2.3"),
        ("npx --yes --package=@scope/server program --flag", "npx -y --package @scope/server program"),
        ("npx -p a -p b program", "npx -y --package a --package b program"),
        ("/usr/bin/npx server", "npx -y server"),
        ("NPX.CMD server", "npx -y server"),
        ("npm exec -y -- server --x", "npx -y server"),
        ("npm --prefix /x exec --package=server -- program", "npx -y --package server program"),
        ("npm x server", "npx -y server"),
        ("pnpm dlx server@latest", "npx -y server@latest"),
        ("pnpm --package=@s/server dlx program", "npx -y --package @s/server program"),
        ("pnpx server", "npx -y server"),
        ("yarn dlx -q -p server program", "npx -y --package server program"),
        ("bunx --bun server", "npx -y server"),
        ("bun x @scope/server", "npx -y @scope/server"),
        ("uvx server --repository /x", "uvx server"),
        ("uvx server@latest", "uvx server"),
        ("uvx server@1.2", "uvx server==1.2"),
        ("uvx 'server[cli]==1.2'", "uvx 'server[cli]==1.2'"),
        (
            "uvx --python 3.12 --with a,b --with=c --from server program",
            "uvx --python 3.12 --with a --with b --with c --from server program",
        ),
        ("uvx -p 3.12 -q server", "uvx --python 3.12 server"),
        ("uv tool run server", "uvx server"),
        ("uv --cache-dir /x tool run --from server program", "uvx --from server program"),
        ("pipx run server==2", "uvx server==2"),
        ("pipx run --spec server --python python3.12 program", "uvx --python 3.12 --from server program"),
        ("python3 -m pipx run server", "uvx server"),
        ("python3.12 -u -m uv tool run server", "uvx server"),
        ("node /usr/lib/node_modules/npm/bin/npx-cli.js -y server", "npx -y server"),
        ("uv run --with server program", "uvx --from server program"),
        ("uv run -q --with=server x.py", "uvx --from server python"),
        ("'npx -y server@0.1.2'", "npx -y server@0.1.2"),
    ],
)
def test_a_launcher_is_refused_with_the_command_that_installs(line: str, command: str) -> None:
    found = fault(line)
    assert found is not None
    cause, message, hint = found
    assert cause == FETCHES
    assert " needs the network at every start, so it cannot start " in message
    assert hint == f"fetch it once: runner install -- {command}; it starts from there then"
    # What is installed by that command is what the line asks for.
    asked, installed = launch_of(shlex.split(line)), launch_of(shlex.split(command))
    assert asked is not None and installed is not None and asked.request == installed.request


@one_case(
    ("line", "command"),
    [
        ("env npx server", "npx -y server"),
        ("nice npx server", "npx -y server"),
        ("nice -n 5 npx server", "npx -y server"),
        ("nice -5 npx server", "npx -y server"),
        ("timeout 5 npx server", "npx -y server"),
        ("timeout -k 1 --signal=TERM 5s uvx server", "uvx server"),
        ("nohup npx server", "npx -y server"),
        ("stdbuf -o0 npx server", "npx -y server"),
        ("stdbuf -o 0 -- npx server", "npx -y server"),
        ("setsid -w npx server", "npx -y server"),
        ("ionice -c 3 nice env npx server", "npx -y server"),
        ("/usr/bin/env -i A=1 -u B npx -y server", "npx -y server"),
        ("env -S 'A=1 npx server' more", "npx -y server"),
        ("env --split-string='npx server'", "npx -y server"),
        ("sh -c 'npx -y server'", "npx -y server"),
        ("bash -lc 'cd /x && A=1 exec uvx server; true'", "uvx server"),
        ("bash -o pipefail -c 'true|pipx run server'", "uvx server"),
        ("sh -c 'env sh -c \"npx server\"'", "npx -y server"),
        ("'npx -y' server", "npx -y server"),
    ],
)
def test_a_launcher_behind_another_program(line: str, command: str) -> None:
    """It cannot be replaced by the stored program there."""
    found = fault(line)
    assert found is not None and found[0] == FETCHES and launch_of(shlex.split(line)) is None
    assert found[2].startswith("write the launcher itself as the command, without ")
    assert f"runner install -- {command}; " in found[2] and "\n" not in found[1] + found[2]


@one_case(
    ("line", "args"),
    [
        ("npx -y server --flag -- x", ["--flag", "--", "x"]),
        ("npm exec server -- --flag", ["--flag"]),
        ("npm exec -- server --flag", ["--flag"]),
        ("uvx --from a b --with c", ["--with", "c"]),
        ("uv run --with a x.py y", ["x.py", "y"]),
        ("pipx run --spec a b -v", ["-v"]),
    ],
)
def test_arguments_after_the_launchers_own_reach_the_program(line: str, args: list[str]) -> None:
    launch = launch_of(shlex.split(line))
    assert launch is not None and list(launch.args) == args


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("uvx --from git+https://git@example.com/a/b program", "is not a package of an index"),
        ("npx git+ssh://example.com/x", "is not a package of a registry"),
        ("npx ./here", "is not a package of a registry"),
        ("npx github:a/b", "is not a package of a registry"),
        ("npx -c 'server --x'", "names no program"),
        ("npx -c 'server --x' y", "runs a line of shell"),
        ("npx --registry https://npm.example server", "names a registry (--registry)"),
        ("uvx --index-url https://x.example/simple server", "only your pip configuration may"),
        ("uvx --python /opt/python server", "asks for the Python"),
        ("uvx --from a ../b", "is not the name of a command"),
        ("uvx python -m server", "starts Python itself"),
        ("uvx python@3.12 -m server", "starts Python itself"),
    ],
)
def test_commands_that_cannot_be_installed_say_why(line: str, why: str) -> None:
    found = fault(line)
    assert found is not None and why in found[2] and "install it by hand" in found[2]


@pytest.mark.parametrize(
    ("line", "option"),
    [
        # The real launcher takes the word behind these for their value: `next` is not the package.
        ("npx --tag next server", "--tag"),
        ("npx -n --inspect server", "-n"),
        ("npx -yp server program", "-yp"),
        ("pnpm dlx --reporter silent server", "--reporter"),
        ("uvx --torch-backend cpu server", "--torch-backend"),
        ("uv run --with server -m module", "-m"),
        ("pipx run --path server", "--path"),
        ("bunx --cwd x server", "--cwd"),
        # These change what the packages are, or where they come from.
        ("npx --@scope:registry=https://npm.example @scope/server", "--@scope:registry"),
        ("npx --before=2020-01-01 server", "--before"),
        ("npx --workspace=x server", "--workspace"),
        ("uvx --with-editable ./x server", "--with-editable"),
        ("uvx --with-requirements x.txt server", "--with-requirements"),
        ("uvx --constraints x.txt server", "--constraints"),
        ("uvx --overrides=x.txt server", "--overrides"),
        ("uvx --exclude-newer 2024-01-01 server", "--exclude-newer"),
        ("uvx --prerelease allow server", "--prerelease"),
        ("uv --directory /x tool run server", "--directory"),
        ("uv --directory /x run --with server program", "--directory"),
    ],
)
def test_an_option_that_may_change_the_package(line: str, option: str) -> None:
    found = fault(line)
    assert found is not None and f"has an option ({option}) that may change which package" in found[2]


@pytest.mark.parametrize("line", ["npx --loglevel error server", "uvx -- server", "pipx run -q -- server"])
def test_an_option_that_changes_nothing(line: str) -> None:
    launch = launch_of(shlex.split(line))
    assert launch is not None and launch.request.packages == ("server",)


@pytest.mark.parametrize(
    "line", ["npx --offline x", "npx --no-install x", "uvx --offline x", "bunx --no-install x"]
)
def test_a_launcher_that_uses_its_cache(line: str) -> None:
    found = fault(line)
    assert found is not None and "from a cache in the home directory, which is not in the cage" in found[1]


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
    assert "by hand" in found[2] and found[1].isprintable() and found[2].isprintable()


def test_a_command_that_a_person_copies_is_quoted() -> None:
    found = fault("uvx 'x>1; rm -rf ~' '$(id)'")
    assert found is not None and "by hand" in found[2]
    found = fault("uvx 'x>1' '$(id)'")
    assert found is not None and "runner install -- uvx 'x>1';" in found[2]


@pytest.mark.parametrize(
    "line",
    [
        "docker run -i --rm --privileged mcp/server",
        "docker -H unix:///x --context c run x",
        "/usr/bin/docker compose run x",
        "docker mcp gateway run",
        "podman run -i --gpus all x",
        "nerdctl run -i x",
        "sh -c 'docker run -it x'",
        "env A=1 docker exec -i x y",
    ],
)
def test_a_container_cannot_be_in_a_cage(line: str) -> None:
    found = fault(line)
    assert found is not None and found[0] == CONTAINER
    if " run " in line and ("docker run" in line or "podman run" in line):
        assert "run starts as an image in a cage, and this one cannot: it has an option" in found[1]
    else:
        assert "starts a container already, and a cage cannot hold it" in found[1]
        assert ("socket" in found[1]) is ("podman" not in line)


def test_what_does_not_go_together_with_an_image() -> None:
    def is_told(asked: tuple[str, str], said: str) -> None:
        line, image = asked
        for argv in (line.split(), [line]):  # also as one word
            found = container_fault(argv, image, has_env_file=True)
            assert said in (found.message if found is not None else "")
            assert found is None or (found.cause == CONTAINER and found.hint)

    rows = {
        ("docker run -i x", "docker.io/y:1"): "starts in an image of its own, and docker.io/y:1 is asked for",
        ("podman run --env-file a x", ""): "podman run has --env-file, and its entry has a file",
        ("docker run -i x", ""): "",
        ("docker exec x y", "docker.io/y:1"): "",
        ("docker run -t x", "docker.io/y:1"): "",
        ("npx x", "docker.io/y:1"): "",
    }
    check_rows(rows.items(), is_told)


def test_an_image_is_fetched_once() -> None:
    for line in (
        "docker run -i --rm mcp/server",
        "podman container run mcp/server",
        "sh -c 'docker run mcp/server'",
    ):
        found = fault(line)
        assert found is not None and found[0] == NOT_INSTALLED
        assert "runner install docker://docker.io/mcp/server:latest; it starts in a cage then" in found[2]
        assert ("without sh" in found[2]) is line.startswith("sh")


@pytest.mark.parametrize("line", ["cmd /c npx -y server", "cmd.exe /d /s /c server", "powershell -c server"])
def test_an_entry_for_windows(line: str) -> None:
    found = fault(line)
    assert found is not None and found[0] == WINDOWS and "written for Windows" in found[1]
    assert ("runner install -- npx -y server" if "npx" in line else "without") in found[2]


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
        assert "runner install -- npx -y server" in done.stderr and len(done.stderr.splitlines()) == 2
    for verb in (("call", *server, "tool"), ("tools", *server), ("explain", *server)):
        done = runner_as(*verb)
        assert done.returncode == 10
        assert (
            said in done.stderr + done.stdout
            and "runner install -- npx -y server" in done.stderr + done.stdout
        )
    checked = runner_as("check", manifest)
    assert checked.returncode == 0
    assert f"{manifest}:4:4: " in checked.stdout and f"warning: {FETCHES}: {said}" in checked.stdout
    assert "0 errors, 1 warning" in checked.stdout
