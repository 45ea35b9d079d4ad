"""Real programs in the cage reach the hosts of their list, and the real servers behind them."""

from __future__ import annotations

import json

import pytest

from tests.egress.conftest import Plugin
from tests.internet import API, API_IPV6, OTHER
from tests.tables import one_case

pytestmark = [pytest.mark.launches, pytest.mark.needs("root")]

LINE = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) as line:
    print(line.makefile().readline().strip())
"""


def test_a_line_protocol_where_the_server_speaks_first(plugin: Plugin) -> None:
    ran = plugin.python(["ipv4.example.com:2525"], LINE, "ipv4.example.com", "2525")
    assert ran.stdout == f"220 {API}\n" and ran.process.returncode == 0
    [connection] = ran.network["connections"]
    assert (connection["name"], connection["port"], connection["verdict"]) == (
        *("ipv4.example.com", 2525, "allowed"),
    )
    assert connection["rule"] == "ipv4.example.com:2525" and connection["address"] == API
    assert connection["received"] == len(f"220 {API}\n") and connection["sent"] == 0


def test_over_ipv6(plugin: Plugin) -> None:
    ran = plugin.python(["ipv6.example.com:2525"], LINE, "ipv6.example.com", "2525")
    assert ran.stdout == f"220 {API_IPV6}\n"


@pytest.mark.needs("curl")
def test_curl_over_http(plugin: Plugin) -> None:
    ran = plugin(["api.example.com:80"], "/usr/bin/curl", "-sS", "-m", "20", "http://api.example.com/x")
    told = json.loads(ran.stdout)
    assert told["host"] == "api.example.com" and told["request"] == "GET /x HTTP/1.1"


@pytest.mark.needs("curl")
def test_curl_over_tls_with_a_test_authority(plugin: Plugin) -> None:
    authority = plugin.internet.authority.read_text()
    script = "import subprocess, sys, os\nopen('/tmp/ca', 'w').write(sys.argv[1])\n"
    script += "os.execv('/usr/bin/curl', ['curl', '-sS', '-m', '20', '--cacert', '/tmp/ca', sys.argv[2]])"
    ran = plugin.python(["api.example.com"], script, authority, "https://api.example.com/x")
    assert json.loads(ran.stdout)["host"] == "api.example.com", ran.process.stderr


@pytest.mark.needs("node")
def test_node(plugin: Plugin) -> None:
    script = (
        "require('http').get('http://api.example.com/n',"
        " answer => { answer.on('data', part => process.stdout.write(part)) })"
    )
    ran = plugin(["api.example.com:80"], "/usr/bin/node", "-e", script)
    assert json.loads(ran.stdout)["request"] == "GET /n HTTP/1.1", ran.process.stderr


def test_every_name_below_a_wildcard_and_not_the_name_itself(plugin: Plugin) -> None:
    below = plugin.python(["*.example.com:2525"], LINE, "deep.api.example.com", "2525")
    assert below.stdout == f"220 {OTHER}\n"
    itself = plugin.python(["*.example.com:2525"], LINE, "example.com", "2525")
    assert itself.stdout == "" and set(itself.verdicts("questions")) == {("example.com", 0, "refused")}


@one_case("name", ["ALIAS.example.COM", "alias.example.com."])
def test_spellings_of_one_name(plugin: Plugin, name: str) -> None:
    ran = plugin.python(["alias.example.com:2525"], LINE, name, "2525")
    assert ran.stdout == f"220 {API}\n"


def test_every_port_of_a_host(plugin: Plugin) -> None:
    ran = plugin.python(["ipv4.example.com:*"], LINE, "ipv4.example.com", "2525")
    assert ran.stdout == f"220 {API}\n"


def test_many_addresses_need_an_answer_over_tcp(plugin: Plugin) -> None:
    ran = plugin.python(["many.example.com:2525"], LINE, "many.example.com", "2525")
    assert ran.stdout.startswith("220 45.33.1."), ran.network
