"""A plugin that uses a credential and does not have it, against servers that say what they got."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from tests.egress.conftest import Plugin
from tests.internet import API

pytestmark = [pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]

VALUE = "ghp_Zq7eVh2KfLw0RtXyBn4MdJs8GcPa1UoT3iQv"
HOSTS = ("api.example.com:443", "other.example.org:443")
HIDE = ("--hide", "github")

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
            f'hosts = ["api.example.com:443"]\nfrom = "env:OUTSIDE"\nvariable = "TOKEN"\n'
            f'authorities = ["{authority}"]\nwhere = ["header", "query"]\n'
        )
        self.said: dict[str, Any] = {}
        self.report: dict[str, Any] = {}

    def ask(
        self, *asked: tuple[str, str, dict[str, str]], hosts: tuple[str, ...] = HOSTS
    ) -> list[tuple[int, str]]:
        words = (VALUE[::-1], json.dumps(asked))
        ran = self.plugin.python(
            hosts, ASK, *words, options=HIDE, more_policy=self.more, environ={"OUTSIDE": VALUE}
        )
        assert ran.process.returncode == 0, ran.process.stderr
        self.said, self.report = json.loads(ran.stdout), ran.report
        everything = f"{ran.stdout}{ran.process.stderr}{json.dumps(ran.report)}"
        for form in forms(VALUE):
            assert form not in everything
        return [(status, text) for status, text in self.said["answers"]]

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
        {"name": "TOKEN", "hosts": ["api.example.com:443"], "where": ["header", "query"]}
    ]
    assert API in {each["address"] for each in told["connections"]}
