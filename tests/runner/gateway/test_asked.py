"""Questions and sign-ins by the command line: a gateway on stdio, a daemon, and an internet of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
import trio
from mcp import MCPError

from runner.serve.client import Client as Door
from tests.conftest import ROOT, Caller
from tests.internet import Internet, make_world
from tests.runner.gateway.entries import at_door, bare, called, on_stdio, put_servers
from tests.runner.gateway.tracker import LOGIN, TRACKER, URL
from tests.runner.serve.served import Served, serving

pytestmark = [pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]


@pytest.fixture
def shelf(plugin_dir: Path) -> Path:
    (plugin_dir / "plugins").mkdir()
    (plugin_dir / "plugins").chmod(0o755)
    return plugin_dir


def put(caller: Caller, path: Path, content: str) -> Path:
    path.write_text(content)
    path.chmod(0o600)
    caller.give(path)
    return path


class Person:
    """At the official client."""

    def __init__(self, *answers: types.ElicitResult) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def answer(self, context: Any, params: Any) -> types.ElicitResult:
        self.asked.append(params.message)
        return self.answers.pop(0)


def yes(**content: Any) -> types.ElicitResult:
    return types.ElicitResult(action="accept", content=content)


NO = types.ElicitResult(action="decline")


@pytest.mark.trio
async def test_a_gateway_on_stdio_asks(runner_as: Caller, shelf: Path) -> None:
    folder = shelf / "plugins"
    put_servers(folder, {"old": (bare(folder), "legacy")})
    settings = put(runner_as, shelf / "settings.toml", '[clients.default]\nconfirm = ["old__add"]\n')
    audit = put(runner_as, shelf / "audit", "")
    options = ("--settings", str(settings), "--audit", str(audit))
    person = Person(yes(remember="once"), NO, yes(remember="always"))
    async with on_stdio(
        runner_as, folder, *options, mode="auto", elicitation_callback=person.answer
    ) as client:
        assert await called(client, "old__echo", {"a": 1}) == (False, '{"a": 1}')
        assert await called(client, "old__add", {"a": 2, "b": 3}) == (False, "5")
        failed, said = await called(client, "old__add", {"a": 2, "b": 4})
        assert failed and said.startswith("policy_denied (call): nobody allowed this call: the person at")
        # A person adds another tool meanwhile.
        added = runner_as("allow", folder, "--server", "old", "--confirm", "ec*")
        listed = runner_as("allow", "--list").stdout
        assert "old (mcp)" in listed and ": a gateway asks you before it calls ec*\n" in listed
        assert added.returncode == 0 and "a gateway asks you before it calls ec*" in added.stdout, (
            added.stderr
        )
        assert await called(client, "old__echo", {"a": 2}) == (False, '{"a": 2}')
    assert person.asked[-1].startswith("May old__echo be called with this?\na: 2\n")
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    asked = [(each["subject"], each["allowed"]) for each in lines if each["kind"] == "confirm"]
    assert asked == [("old__add", True), ("old__add", False), ("old__echo", True)]
    made = [each["name"] for each in lines if each["kind"] == "tool"]
    assert made == ["echo", "add", "echo"]
    # Without a way to ask it is a no; and what was said for good still counts.
    async with on_stdio(runner_as, folder, *options, mode="auto") as client:
        assert await called(client, "old__echo", {"a": 3}) == (False, '{"a": 3}')
        failed, said = await called(client, "old__add", {"a": 2, "b": 3})
        assert failed and "there is no daemon that could" in said
        assert "you said yes for good to echo for the client default" in runner_as("allow", "--list").stdout
        confirm = ("allow", folder, "--server", "old", "--confirm")
        assert runner_as(*confirm, "none").returncode == 0
        refused = runner_as(*confirm, "ec*", "--confirm", "hosts")  # that is no tool, and of no one plugin
        assert refused.returncode == 2 and "table of the gateway's settings" in refused.stderr
        assert runner_as(*confirm, "host[s]").returncode == 0
        assert "before it calls host[s]\n" in runner_as("allow", "--list").stdout


def pending(served: Served) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = served.ask("GET", "/pending")[1]["pending"]
    return found


# The official client leaves generators of its HTTP library unfinished.
@pytest.mark.filterwarnings("ignore:Async generator", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.trio
async def test_the_operator_answers_at_the_daemon(runner_as: Caller, shelf: Path) -> None:
    folder = shelf / "plugins"
    put_servers(folder, {"old": (bare(folder), "legacy")})
    settings = put(runner_as, shelf / "settings.toml", '[clients.default]\nconfirm = ["destructive"]\n')
    person, said = Person(yes()), dict[str, tuple[bool, str]]()
    with serving(runner_as, shelf, "--gateway-settings", str(settings)) as served:
        at = ("--socket", served.socket)

        async def make(a: str) -> None:
            said[a] = await called(client, "old__echo", {"a": a})

        async with at_door(served.socket, mode="legacy") as client:
            async with trio.open_nursery() as nursery:
                for each in ("yes", "no", "session\x1b[2J"):
                    nursery.start_soon(make, each)
                while len(pending(served)) < 3:
                    await trio.lowlevel.checkpoint()
                listed = runner_as("ctl", "pending", *at)
                assert listed.returncode == 0 and '    a: "session\\u001b[2J"' in listed.stdout.splitlines()
                numbers = {row["lines"][0]: row["id"] for row in pending(served)}
                for each, action in {"yes": "approve", "no": "deny"}.items():
                    ran = runner_as("ctl", action, numbers[f'a: "{each}"'], *at)
                    assert ran.returncode == 0, ran.stderr
                last = numbers['a: "session\\u001b[2J"']
                ran = runner_as("ctl", "approve", last, "--remember", "session", *at)
                assert ran.stdout == "old__echo: allowed\n"
                again = runner_as("ctl", "approve", last, *at)
                assert again.returncode != 0 and "waits for an answer: it has one" in again.stderr
            assert said["yes"] == (False, '{"a": "yes"}') and not said["session\x1b[2J"][0]
            assert said["no"][0] and "said no" in said["no"][1]
            assert not (await called(client, "old__echo", {"a": 4}))[0]  # of this session
        # A client that can ask its own person, in another session.
        async with at_door(served.socket, mode="legacy", elicitation_callback=person.answer) as client:
            assert await called(client, "old__echo", {"a": 5}) == (False, '{"a": 5}')
        assert len(person.asked) == 1
        # The newer protocol has no sessions by HTTP, so no yes counts for one, also if a client makes one up.
        newer, made_up = Person(yes(remember="session"), yes(remember="once")), {"mcp-session-id": "mine"}
        async with at_door(served.socket, made_up, mode="auto", elicitation_callback=newer.answer) as client:
            failed, told = await called(client, "old__echo", {"a": 6})
            assert failed and "gave no answer that counts" in told
            assert await called(client, "old__echo", {"a": 7}) == (False, '{"a": 7}')
        rows = served.ask("GET", "/audit?what=confirm")[1]["audit"]
        assert [row["detail"]["allowed"] for row in rows].count(False) == 2 and len(rows) == 6
        assert {row["plugin"] for row in rows} == {"old"}
        calls = served.ask("GET", "/calls?code=ok")[1]["calls"]
        assert len(calls) == 5  # what was refused was never a call
        with Door(served.socket) as door:  # it is for the operator: a page of a browser sends an origin
            assert (
                door.request("POST", f"/pending/{last}/approve", None, {"Origin": "http://x"}).status == 403
            )


# --- an internet of its own ---------------------------------------------------------------------------------

BROWSE = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=60).read().decode())"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, templates: None) -> Iterator[Internet]:
    sockets = {"tracker.sock": (TRACKER, 443), "login.sock": (LOGIN, 443)}
    with make_world(tmp_path_factory.mktemp("internet"), None, sockets) as made:
        yield made


@pytest.fixture
def tracker(world: Internet) -> Iterator[subprocess.Popen[str]]:
    folder = world.authority.parent
    paths = [str(folder / name) for name in ("server.pem", "server.key", "tracker.sock", "login.sock")]
    argv = [sys.executable, "-m", "tests.runner.gateway.tracker", *paths]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "0\n"
            for path in paths[2:]:
                os.chmod(path, 0o666)
            yield process
        finally:
            process.kill()
    for path in paths[2:]:
        os.unlink(path)


def policy(folder: Path, *hosts: str) -> Path:
    text = (ROOT / "policies/default.toml").read_text()
    listed = f'ceiling = "allowlist"\nhosts = {json.dumps(hosts)}\nprivate = "deny"'
    changed = text.replace('ceiling = "none"\nhosts = []\nprivate = "deny"', listed)
    assert changed != text
    path = folder / "policy.toml"
    path.write_text(changed)
    path.chmod(0o644)
    return path


@pytest.mark.needs("root")
@pytest.mark.trio
async def test_sign_in_by_the_command_line(
    world: Internet, tracker: subprocess.Popen[str], runner_as: Caller, shelf: Path
) -> None:
    here = world.on_machine(runner_as)
    trusted = shelf / "authority.pem"  # where every user can read it
    trusted.write_bytes(world.authority.read_bytes())
    trusted.chmod(0o644)
    environ = {"SSL_CERT_FILE": str(trusted)}
    settings = put(runner_as, shelf / "settings.toml", f'[remotes.tracker]\nurl = "{URL}"\n')
    chosen = policy(shelf, f"{TRACKER}:443", f"{LOGIN}:443")
    runner_as.give(chosen)
    words = ("gateway", "login", "tracker", "--settings", settings, "--policy", chosen)
    with here.start(*words, env=environ) as process:
        assert process.stdout is not None and process.stderr is not None
        link = process.stdout.readline().decode().strip()
        assert link.startswith(f"https://{LOGIN}/authorize?"), process.stderr.read()
        browser = [*here.prefix, *here.python, "-c", BROWSE, link]
        page = await trio.run_process(browser, env={**here.environ, **environ}, capture_stdout=True)
        assert b"You are signed in" in page.stdout
        assert process.wait(60) == 0, process.stderr.read()
        assert b"signed in at tracker" in process.stderr.read()
    options = ("--settings", str(settings), "--policy", str(chosen))
    config = shelf / "plugins"
    with_roots = dataclasses.replace(here, environ={**here.environ, **environ})
    async with on_stdio(with_roots, config, *options, mode="auto") as client:
        assert await called(client, "tracker__close", {"number": 4}) == (False, "closed 4")
        assert tracker.stdin is not None and tracker.stdout is not None
        tracker.stdin.write("forget\n")
        tracker.stdin.flush()
        assert json.loads(tracker.stdout.readline()) == ["registered", "exchanged"]
        failed, said = await called(client, "tracker__close", {"number": 5})
        assert failed and f"run: runner gateway login tracker --settings {settings} --policy {chosen}" in said
    out = here("gateway", "logout", "tracker", "--settings", settings)
    assert out.returncode == 0 and "signed out here" in out.stderr
    # Without the authorization server on the policy's list, nobody is led there. The policy is that of the
    # gateway which will use the sign-in.
    policy(shelf, f"{TRACKER}:443")
    table = '[clients.ide]\npolicy = "policy.toml"\n'
    put(runner_as, settings, f'[remotes.tracker]\nurl = "{URL}"\n{table}')
    login = ("gateway", "login", "tracker", "--settings", settings)
    rows: dict[str, tuple[tuple[str | Path, ...], str]] = {
        "the option": ((*login, "--policy", chosen), LOGIN),
        "the client's": ((*login, "--client", "ide"), LOGIN),
        "the option first": ((*login, "--client", "ide", "--policy", "default"), TRACKER),
        "the usual": (login, TRACKER),
    }
    for name, (row, host) in rows.items():
        refused = here(*row, env=environ)
        assert refused.returncode != 0 and f"does not list the host {host}:443" in refused.stderr, name
        assert "Traceback" not in refused.stderr and not refused.stdout
    # What a gateway tells to type has the policy that it has.
    at = ("--settings", str(settings), "--client", "ide")
    async with on_stdio(with_roots, config, *at, mode="auto") as client:
        with pytest.raises(MCPError, match=re.escape(f"login tracker --settings {settings} --client ide")):
            await called(client, "tracker__close", {"number": 6})
    refused = here(*login, "--client", "other", env=environ)
    assert refused.returncode == 2 and "have no such client; they have ide" in refused.stderr


@pytest.mark.needs("root")
@pytest.mark.trio
async def test_a_host_is_refused_asked_about_and_reached(
    world: Internet, runner_as: Caller, shelf: Path
) -> None:
    folder, here = shelf / "plugins", world.on_machine(runner_as)
    (folder / "reaching.py").write_bytes(Path(__file__).with_name("reaching.py").read_bytes())
    put_servers(folder, {"reaching": ("reaching.py",)})
    settings = put(runner_as, shelf / "settings.toml", '[clients.default]\nconfirm = ["hosts"]\n')
    person = Person(NO, yes(allow=True))
    options = ("--settings", str(settings))
    async with on_stdio(here, folder, *options, mode="legacy", elicitation_callback=person.answer) as client:

        async def reach(host: str) -> str:
            return (await called(client, "reaching__reach", {"host": host}))[1]

        assert "not reached" in await reach("other.example.org")
        assert "not reached" in await reach("api.example.com")
        while (said := await reach("api.example.com")) != "reached":  # a gate may tell later than a plugin
            assert "not reached" in said
        assert "not reached" in await reach("other.example.org")  # it is asked about once
    assert [text.split(",")[0] for text in person.asked] == [
        "reaching tried to reach other.example.org:443",
        "reaching tried to reach api.example.com:443",
    ]
    listed = runner_as("allow", "--list").stdout
    assert "api.example.com:443" in listed and "other.example.org" not in listed


@pytest.mark.needs("root")
@pytest.mark.filterwarnings("ignore:Async generator", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.trio
async def test_a_host_at_the_daemon_is_the_operators_to_allow(
    world: Internet, runner_as: Caller, shelf: Path
) -> None:
    folder, here = shelf / "plugins", world.on_machine(runner_as)
    (folder / "reaching.py").write_bytes(Path(__file__).with_name("reaching.py").read_bytes())
    put_servers(folder, {"reaching": ("reaching.py",)})
    settings = put(runner_as, shelf / "settings.toml", '[clients.default]\nconfirm = ["hosts"]\n')
    with serving(here, shelf, "--gateway-settings", str(settings)) as served:
        person = Person()
        async with at_door(served.socket, mode="legacy", elicitation_callback=person.answer) as client:
            given = {"host": "api.example.com"}
            assert "not reached" in (await called(client, "reaching__reach", given))[1]
            while not pending(served):
                await trio.lowlevel.checkpoint()
            [row] = pending(served)
            assert (row["kind"], row["subject"]) == ("host", "api.example.com:443")
            listed = runner_as("ctl", "pending", "--socket", served.socket)
            assert "reaching tried to reach api.example.com:443, and was refused" in listed.stdout
            approve = ("ctl", "approve", row["id"], "--socket", served.socket)
            ours, theirs = pty.openpty()
            process = runner_as.start(*approve, stdin=theirs, stdout=subprocess.PIPE)
            os.close(theirs)
            os.write(ours, b"y\n")
            out, err = await trio.to_thread.run_sync(process.communicate)
            os.close(ours)
            assert process.returncode == 0 and b"Allow this? [y/N]" in out + err, out + err
            while (await called(client, "reaching__reach", given))[1] != "reached":  # it is started anew
                await trio.lowlevel.checkpoint()
        assert not person.asked and not pending(served)
        [noted] = served.ask("GET", "/audit?what=confirm")[1]["audit"]
        assert (noted["plugin"], noted["detail"]["subject"]) == ("reaching", "api.example.com:443")
        assert noted["detail"]["allowed"] is True and noted["caller"].startswith("uid:")
