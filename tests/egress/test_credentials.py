"""A plugin that uses a credential and does not have it, against servers that say what they got."""

from __future__ import annotations

import base64
import contextlib
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.egress.conftest import PYTHON, Plugin, Ran
from tests.internet import API

pytestmark = [pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]

VALUE = "ghp_Zq7eVh2KfLw0RtXyBn4MdJs8GcPa1UoT3iQv"
OTHER = "sk-of-another-plugin-0123456789"
HOSTS = ("api.example.com:443", "git.example.com:443", "other.example.org:443")
HIDE = ("--hide", "github@api.example.com", "--hide", "github@git.example.com")

# Asks each URL of argv with the headers behind it, and prints the answers, and what of the value it finds.
ASK = """
import http.client, json, os, ssl, sys, urllib.error, urllib.request
token, value = os.environ["TOKEN"], sys.argv[1][::-1].encode()
def context(url):  # nobody here vouches for the second host
    return ssl.create_default_context() if "api." in url else ssl._create_unverified_context()
def ask(url, method, headers):
    filled = {name: text.replace("TOKEN", token) for name, text in headers.items()}
    asked = urllib.request.Request(url.replace("TOKEN", token), method=method, headers=filled)
    try:
        with urllib.request.urlopen(asked, timeout=30, context=context(url)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)
answers = [ask(*each) for each in json.loads(sys.argv[2])]
found = []
for top, folders, files in os.walk("/"):
    folders[:] = [each for each in folders if os.path.join(top, each) not in ("/usr", "/sys", "/lib")]
    for name in files:
        path = os.path.join(top, name)
        if top.startswith("/proc") and name not in ("environ", "cmdline", "comm"):
            continue
        try:
            with open(path, "rb") as file:
                found += [path] if value in file.read(1 << 22) else []
        except OSError:
            pass
print(json.dumps({"token": token, "answers": answers, "found": found, "env": [*os.environ.values()]}))
"""


class Desk:
    """The plugin, under a policy with a credential for api.example.com."""

    def __init__(self, plugin: Plugin) -> None:
        self.plugin = plugin
        authority = plugin.write(plugin.folder / "operator/ca.pem", plugin.internet.authority.read_text())
        self.more = (
            "[credentials.github]\n"
            f'hosts = ["api.example.com:443", "git.example.com:443"]\nfrom = "env:OUTSIDE"\n'
            'variable = "TOKEN"\n'
            f'authorities = ["{authority}"]\nwhere = ["header", "query"]\n'
        )
        self.said: dict[str, Any] = {}
        self.report: dict[str, Any] = {}

    def ask(
        self, *asked: tuple[str, str, dict[str, str]], hosts: tuple[str, ...] = HOSTS
    ) -> list[tuple[int, str]]:
        ran = self.run(hosts, PYTHON, "-I", "-c", ASK, VALUE[::-1], json.dumps(asked))
        self.said, self.report = json.loads(ran.stdout), ran.report
        return [(status, text) for status, text in self.said["answers"]]

    def run(self, hosts: tuple[str, ...], *command: str) -> Ran:
        ran = self.plugin(hosts, *command, options=HIDE, more_policy=self.more, environ={"OUTSIDE": VALUE})
        assert ran.process.returncode == 0, ran.process.stderr
        everything = f"{ran.stdout}{ran.process.stderr}{json.dumps(ran.report)}"
        kept = b"".join(path.read_bytes() for path in self.plugin.caller.home.rglob("*") if path.is_file())
        for form in forms(VALUE):
            assert form not in everything and form.encode() not in kept
        return ran

    def seen(self) -> list[dict[str, Any]]:
        return [each for each in self.plugin.internet.look() if each["seen"] == "request"]


def forms(value: str) -> list[str]:
    """The value, and it in base64 at each of its three places."""
    coded = [base64.b64encode(b" " * skip + value.encode()).decode() for skip in range(3)]
    return [value, *(text[4:-4] for text in coded)]


@pytest.fixture
def desk(plugin: Plugin) -> Desk:
    return Desk(plugin)


def test_the_value_goes_to_its_host_and_nowhere_else(desk: Desk) -> None:
    answers = desk.ask(
        (
            "https://api.example.com/headers/one?q=1",
            "GET",
            {"Authorization": "Bearer TOKEN", "X-Odd": "aTOKENb"},
        ),
        ("https://other.example.org/headers/two", "GET", {"Authorization": "Bearer TOKEN"}),
        ("https://api.example.com/three?key=TOKEN", "GET", {}),
    )
    assert [status for status, _ in answers] == [200, 200, 200], answers
    token = desk.said["token"]
    assert token != VALUE and len(token) == len(VALUE) and token.startswith("ghp_")
    assert desk.said["found"] == [] and not any(VALUE in text for text in desk.said["env"])
    one, two, three = desk.seen()
    assert two["headers"]["authorization"] == f"Bearer {token}"
    assert one["headers"]["authorization"] == f"Bearer {VALUE}" and one["headers"]["x-odd"] == f"a{VALUE}b"
    assert three["line"] == f"GET /three?key={VALUE} HTTP/1.1"
    echoed = json.loads(answers[0][1])["headers"]
    assert echoed["authorization"] == f"Bearer {token}" and token in answers[2][1]
    told = desk.report["network"]
    assert [
        (each["method"], each["path"], each["status"], each["credential"]) for each in told["requests"]
    ] == [
        ("GET", "/headers/one", 200, "TOKEN"),
        ("GET", "/three", 200, "TOKEN"),
    ]
    assert told["credentials"] == [
        {
            "name": "TOKEN",
            "hosts": ["api.example.com:443", "git.example.com:443"],
            "where": ["header", "query"],
        }
    ]
    assert API in {each["address"] for each in told["connections"]}


SLOT = "key-9Xk2Lm4Qp7Rs1Tv3Wy5Za8Bc6De0Fg"
VAI = """\
api_version = "vai.plugin.v1"
package_id = "example/slots"
version = "1.0.0"
name = "Slots"
[runtime]
protocol = "vai.rpc.v1"
entrypoint = ["./slots"]
[[exports]]
id = "ask"
kind = "hook"
[exports.permissions]
network = "egress"
secret_slots = ["api_key", "shown"]
[exports.hook]
subscribes_to = ["run.completed"]
"""
SLOTS = """\
#!/usr/bin/python3 -I
import json, os, urllib.request
slots = {name: open(os.environ["VAI_SECRETS_DIR"] + "/" + name).read() for name in ("api_key", "shown")}
request = urllib.request.Request("https://api.example.com/headers/slot", headers={"X-Key": slots["api_key"]})
with urllib.request.urlopen(request, timeout=30) as answer:
    print(json.dumps({**slots, "answer": answer.read().decode(), "variables": sorted(os.environ)}))
"""


def test_a_secret_slot_is_used_and_not_had(desk: Desk) -> None:
    """The file of the slot has the placeholder. Another slot has its value, as always."""
    plugin = desk.plugin
    folder = plugin.folder / "slots"
    plugin.write(folder / "slots", SLOTS, mode=0o755)
    manifest = plugin.write(folder / "vai-plugin.toml", VAI)
    key, shown = (plugin.write(plugin.folder / f"operator/{name}", name) for name in ("key", "shown"))
    key.write_text(SLOT)
    policy = plugin.policy(f"ceiling = 'allowlist'\nhosts = {json.dumps(HOSTS)}", desk.more)
    report = plugin.caller.home / "report.json"
    hide = ("--hide", "github@git.example.com", "--hide", "api_key@api.example.com")
    done = plugin.caller(
        "exec",
        *("--policy", policy, "--report", report, *hide),
        *("--secret", f"api_key=@{key}", "--secret", f"shown=@{shown}"),
        manifest,
        env={"OUTSIDE": VALUE},
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["shown"] == "shown" and "api_key" not in said["variables"]
    assert said["api_key"] != SLOT and len(said["api_key"]) == len(SLOT)
    assert said["api_key"] in said["answer"] and SLOT not in done.stdout + done.stderr + report.read_text()
    (asked,) = desk.seen()
    assert asked["headers"]["x-key"] == SLOT
    stray = plugin.caller(
        *("exec", "--policy", policy, "--hide", "api_key@elsewhere.example.com"),
        *("--secret", f"api_key=@{key}", "--secret", f"shown=@{shown}"),
        manifest,
    )
    assert stray.returncode == 126 and "may not reach elsewhere.example.com" in stray.stderr


# Each line asks a host with the token in a header, by another client.
API_PLACE = "https://api.example.com/headers"
NODE = f"""
fetch("{API_PLACE}/node", {{headers: {{"x-token": process.env.TOKEN}}}})
    .then(answer => answer.text()).then(text => console.log(text))
"""
URLLIB = f"""
import os, urllib.request as r
print(r.urlopen(r.Request("{API_PLACE}/urllib", headers={{"X-Token": os.environ["TOKEN"]}})).read())
"""
OPENSSL = "".join(
    f"{line}\\r\\n"
    for line in (
        "GET /headers/openssl HTTP/1.1",
        "Host: api.example.com",
        "X-Token: %s",
        "Connection: close",
        "",
    )
)
CLIENTS = {
    "curl": f'curl -sS -m 30 -H "Authorization: token $TOKEN" {API_PLACE}/curl',
    "curl basic": f"curl -sS -m 30 -u me:$TOKEN {API_PLACE}/basic",
    "curl http2": f'curl -sS -m 30 --http2 -H "X-Token: $TOKEN" {API_PLACE}/http2',
    "curl upload": f'head -c 300000 /dev/zero | curl -sS -m 30 -T - -H "X-Token: $TOKEN" {API_PLACE}/up',
    "git": 'git -c http.extraHeader="X-Token: $TOKEN" ls-remote https://git.example.com/x.git',
    "node": f"node -e {shlex.quote(NODE)}",
    "urllib": f"python3 -c {shlex.quote(URLLIB)}",
    "openssl": f"printf '{OPENSSL}' \"$TOKEN\" | openssl s_client -quiet -verify_return_error"
    " -connect api.example.com:443 -servername api.example.com 2>&1",
}


@pytest.mark.needs("curl")
def test_programs_need_not_know(desk: Desk) -> None:
    """Each finds the authority of its launch in the usual place, or by a variable."""
    known = {
        name: line for name, line in CLIENTS.items() if shutil.which(name.split()[0]) or name == "urllib"
    }
    hosts = ("api.example.com:443", "git.example.com:443")
    ran = desk.run(
        hosts,
        "/bin/sh",
        "-c",
        "".join(f"{line} || echo failed {name}; echo\n" for name, line in known.items()),
    )
    assert "failed" not in ran.stdout, (ran.stdout, ran.process.stderr)
    asked = {each["line"].split()[1].partition("?")[0]: each["headers"] for each in desk.seen()}
    places = {f"/headers/{name.split()[-1].replace('upload', 'up')}" for name in known} - {"/headers/git"}
    assert places <= set(asked)
    without = {place for place, headers in asked.items() if VALUE not in " ".join(headers.values())}
    assert without == {"/headers/basic"}
    basic = base64.b64encode(f"me:{VALUE}".encode()).decode()
    assert asked["/headers/basic"]["authorization"] == f"Basic {basic}"
    if "git" in known:
        assert "refs/heads/main" in ran.stdout and asked["/x.git/info/refs"]["x-token"] == VALUE
    assert {each["verdict"] for each in ran.report["network"]["requests"]} == {"allowed"}


# Tells when it has asked once, and waits.
WAITS = """
import os, sys, urllib.request as r
r.urlopen(r.Request("https://api.example.com/headers", headers={"X-Token": os.environ["TOKEN"]})).read()
print("asked", flush=True)
sys.stdin.read()
"""


def test_rules_about_requests(desk: Desk) -> None:
    """Also without a credential, and in clear text. What no rule has is answered in the server's place."""
    places = [
        *(
            ("GET", "/headers/repos/acme/x"),
            ("GET", "/headers/repos/acme"),
            ("GET", "/headers/repos/acme/a/../../x"),
        ),
        *(
            ("POST", "/headers/repos/acme/x"),
            ("GET", "/headers/repos/acme/%2e%2e/x"),
            ("GET", "/headers/repos/other"),
        ),
    ]
    rule = "GET,HEAD api.example.com:80,443/headers/repos/acme/**"
    for scheme in ("https", "http"):
        asked: list[tuple[str, str, dict[str, str]]] = [
            (f"{scheme}://api.example.com{path}", method, {}) for method, path in places
        ]
        answers = desk.ask(*asked, hosts=(rule, HOSTS[1]))
        assert [status for status, _ in answers] == [200, 403, 403, 403, 403, 403], answers
        assert "repos/acme/**" in answers[3][1]
        assert [each["line"] for each in desk.seen()] == ["GET /headers/repos/acme/x HTTP/1.1"]
        told = [(each["verdict"], each["rule"]) for each in desk.report["network"]["requests"]]
        assert told == [("allowed", rule), *[("refused", "")] * 5]


LEAVES = """
import socket, sys
line = socket.create_connection(("registry.example.com", 80), 20)
line.sendall(b"GET /silent?TOKEN HTTP/1.1\\r\\nHost: registry.example.com\\r\\n\\r\\n")
"""


def test_what_it_sent_arrives_although_it_has_gone(plugin: Plugin) -> None:
    """The server never answers, and nobody waits for that."""
    (plugin.internet.registry / "silent").touch()
    ran = plugin.python(["GET registry.example.com:80/silent"], LEAVES)
    assert ran.process.returncode == 0, ran.process.stderr
    asked: list[str] = []
    while not asked:  # the server may still be about to read it
        asked = plugin.internet.requests()
    assert asked == ["GET /silent?TOKEN"]
    [connection] = ran.network["connections"]
    assert connection["reason"] == "was closed: the plugin has ended", connection


@pytest.mark.needs("root")
def test_only_the_runner_and_the_broker_have_it(desk: Desk) -> None:
    """Not even copies that were left where the environment had been."""
    plugin = desk.plugin
    manifest = plugin.manifest(("api.example.com:443", "git.example.com:443"), PYTHON, "-I", "-c", WAITS)
    policy = plugin.policy('ceiling = "open"\nhosts = ["*:*"]', desk.more)
    words = ("exec", "--policy", policy, *HIDE, manifest)
    environ = {"OUTSIDE": VALUE, "OTHER_TOKEN": OTHER}
    with plugin.caller.start(*words, env=environ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"asked\n"
        tree = [psutil.Process(process.pid)]
        runner = next(each for each in (*tree, *tree[0].children()) if "runner" in " ".join(each.cmdline()))
        every = runner.children(recursive=True)
        having = [each.pid for each in every if VALUE.encode() in memory_of(each.pid)]
        beside = {each.pid for each in runner.children() if each.cmdline() == runner.cmdline()}
        assert len(every) >= 5 and len(beside) == 2  # the gate and the broker are forks of the runner
        assert len(having) == 1 and having[0] in beside, (having, every)
        assert OTHER.encode() not in memory_of(having[0])  # of another plugin
        process.stdin.close()
        assert process.wait(30) == 0


def memory_of(pid: int) -> bytes:
    found = []
    with Path(f"/proc/{pid}/maps").open() as maps, Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        for line in maps:
            place, rights = line.split()[:2]
            if rights.startswith("r") and not line.rstrip().endswith(
                ("[vvar]", "[vsyscall]", "[vvar_vclock]")
            ):
                start, end = (int(each, 16) for each in place.split("-"))
                with contextlib.suppress(OSError):
                    memory.seek(start)
                    found.append(memory.read(end - start))
    return b"".join(found)


# Prints what it has, and no more.
SHOWS = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv]))"


def test_a_value_that_is_filled_in_elsewhere_is_hidden_there_too(desk: Desk) -> None:
    """Also where another value begins with what it ends with, and where the manifest has a decoy."""
    before = "an-own-value-of-the-author-"
    entry = {
        "command": PYTHON,
        "args": ["-I", "-c", SHOWS, "x${TOKEN}y"],
        "env": {
            "LITERAL": f"{before}{VALUE[:4]}",
            "BOTH": f"{before}${{TOKEN}}",
            "AWAY": "a-decoy-of-the-author",
            "REAL": "<${AWAY}>",
        },
        "x-sandbox": {"network": list(HOSTS), "hide": ["LITERAL@git.example.com"]},
    }
    plugin = desk.plugin
    manifest = plugin.write(plugin.folder / ".mcp.json", json.dumps({"mcpServers": {"demo": entry}}))
    policy = plugin.policy('ceiling = "open"\nhosts = ["*:*"]')
    policy.write_text(policy.read_text().replace('ceiling = ["LANG",', 'ceiling = ["TOKEN", "AWAY", "LANG",'))
    hides = ("--hide", "TOKEN@api.example.com", "--hide", "AWAY@git.example.com")
    words, environ = ("exec", "--policy", policy), {"TOKEN": VALUE, "AWAY": VALUE[::-1]}
    plain = plugin.caller(*words, manifest, env=environ)
    env, argv = json.loads(plain.stdout)  # the control: it is filled in
    assert (env["BOTH"][-8:], env["REAL"], argv[1]) == (VALUE[-8:], f"<{VALUE[::-1]}>", f"x{VALUE}y")
    done = plugin.caller(*words, *hides, manifest, env=environ)
    assert done.returncode == 0, done.stderr
    for form in (VALUE, VALUE[4:], VALUE[::-1], before + VALUE[:4], "a-decoy"):
        assert form not in done.stdout
    env, argv = json.loads(done.stdout)
    assert len(env["BOTH"]) == len(before + VALUE) and env["TOKEN"] in argv[1] and env["REAL"][0] == "<"


@pytest.mark.parametrize(
    ("value", "more", "said"),
    [
        ("abcdefgh", "", "too short"),
        (f"{VALUE} ", "", "ends with a blank"),
        (VALUE, 'authorities = ["/no/such"]', "cannot be read"),
        (VALUE, 'authorities = ["/etc/hostname"]', "has no certificate"),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_starts(
    plugin: Plugin, value: str, more: str, said: str
) -> None:
    table = f'[credentials.TOKEN]\nhosts = ["api.example.com:443"]\nfrom = "env:OUTSIDE"\n{more}\n'
    ran = plugin(
        ["api.example.com"],
        "/bin/true",
        options=["--hide", "TOKEN"],
        more_policy=table,
        environ={"OUTSIDE": value},
    )
    assert ran.process.returncode == 126 and said in ran.process.stderr, ran.process.stderr
    assert " bug" not in ran.process.stderr and value not in ran.process.stderr


def test_a_plan_with_a_value_of_the_manifest_is_not_stored(desk: Desk) -> None:
    plugin = desk.plugin
    sandbox = {"network": list(HOSTS), "hide": ["OWN@api.example.com"]}
    entry = {"command": "/bin/true", "env": {"OWN": VALUE}, "x-sandbox": sandbox}
    manifest = plugin.write(plugin.folder / "mcp.json", json.dumps({"mcpServers": {"demo": entry}}))
    words = ("exec", "--policy", plugin.policy('ceiling = "open"\nhosts = ["*:*"]'), manifest)
    done = plugin.caller(*words, env={"RUNNER_DEBUG": "1"})
    assert done.returncode == 0, done.stderr
    assert "not stored: a credential that the plugin does not get is in its manifest" in done.stderr


def test_a_plan_of_a_hidden_value_is_no_script(desk: Desk) -> None:
    plugin = desk.plugin
    manifest = plugin.manifest(HOSTS[:2], "/bin/true")
    words = (
        "plan",
        "--policy",
        plugin.policy('ceiling = "open"\nhosts = ["*:*"]', desk.more),
        *HIDE,
        manifest,
    )
    for more in ((), ("--emit", "json"), ("--emit", "sh"), ("--emit", "argv")):
        done = plugin.caller(*words, *more, env={"OUTSIDE": VALUE, "TOKEN": VALUE})
        assert VALUE not in done.stdout + done.stderr
        assert ("only the runner puts placeholders" in done.stderr) is (more[1:] in (("sh",), ("argv",)))
