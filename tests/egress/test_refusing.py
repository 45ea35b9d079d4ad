"""What is not on the list is refused at once, and nothing of it leaves the machine."""

from __future__ import annotations

import json

import pytest

from tests.egress.conftest import Plugin
from tests.egress.test_reaching import LINE
from tests.internet import API, HOST, OTHER, PRIVATE
from tests.tables import one_case

pytestmark = [pytest.mark.launches, pytest.mark.needs("root")]

# Tries each address in argv, and prints what came of it: the server's line, or the error's name. A refusal
# has to come at once. The time limit only keeps a broken build from hanging: it is no part of the check.
TRY = """
import errno, json, socket, sys
found = []
for host, port in json.loads(sys.argv[1]):
    try:
        with socket.create_connection((host, port), 20) as line:
            found.append(line.makefile().readline().strip() or "closed")
    except socket.gaierror:
        found.append("unknown")
    except TimeoutError:
        found.append("TIMEOUT")
    except OSError as error:
        found.append(errno.errorcode[error.errno])
print(json.dumps(found))
"""

LISTED = ["api.example.com:2525", "ipv4.example.com:2525"]
CONTROL = ("ipv4.example.com", 2525)
REACHED = f"220 {API}"


def tried(
    plugin: Plugin, *targets: tuple[str, int], hosts: list[str] | None = None, **more: str
) -> list[str]:
    """What came of each, after the control, which has to work."""
    ran = plugin.python(hosts or LISTED, TRY, json.dumps([CONTROL, *targets]), **more)
    assert ran.process.returncode == 0, ran.process.stderr
    first, *rest = json.loads(ran.stdout)
    assert first == REACHED, ran.network
    return rest


LITERAL = (API, OTHER, PRIVATE, HOST, "169.254.169.254", "192.168.1.1", "255.255.255.255", "2600:1f00::10")
LOOPBACK = (("127.0.0.1", 631), ("127.0.0.1", 22), ("::1", 22), ("localhost", 8080))
OTHER_PORTS = (("ipv4.example.com", 80), ("api.example.com", 22), ("api.example.com", 443))


def test_addresses_and_ports_that_are_not_listed(plugin: Plugin) -> None:
    """Literal addresses have no route, the host's own loopback is another one, and so are other ports of a
    listed host. The last is a port that only another host of the list has."""
    literal = [(address, 2525) for address in LITERAL]
    only_others = ("ipv4.example.com", 7)
    hosts = [*LISTED, "other.example.org:7"]
    *found, last = tried(plugin, *literal, *LOOPBACK, *OTHER_PORTS, only_others, hosts=hosts)
    routes, closed = found[: len(literal)], found[len(literal) :]
    assert set(routes) <= {"ENETUNREACH", "EACCES", "EHOSTUNREACH", "EADDRNOTAVAIL"}, found
    assert closed == ["ECONNREFUSED"] * (len(LOOPBACK) + len(OTHER_PORTS)), found
    assert last in ("ECONNREFUSED", "ECONNRESET", "closed")
    assert plugin.internet.connections() == [API]


def test_a_port_that_no_host_of_the_list_has(plugin: Plugin) -> None:
    """It is refused at once, and told once, with the option that allows that host and port."""
    targets = [CONTROL, *[("ipv4.example.com", 7)] * 3, ("127.0.0.1", 7), ("198.18.128.200", 7)]
    ran = plugin.python(LISTED, TRY, json.dumps(targets))
    assert json.loads(ran.stdout) == [REACHED, *["ECONNREFUSED"] * 5]
    assert plugin.internet.connections() == [API]
    assert set(ran.verdicts()) == {
        *(("ipv4.example.com", 2525, "allowed"), ("ipv4.example.com", 7, "refused")),
        ("127.0.0.1", 7, "refused"),
    }
    told = [line for line in ran.process.stderr.splitlines() if "ipv4.example.com" in line]
    refused = "the plugin asked for ipv4.example.com:7, which was refused: it is not in its list"
    remedy = f"runner allow {plugin.folder}/mcp.json --net ipv4.example.com:7"
    assert told == [f"runner: {refused}; to let it reach that host: {remedy}"]


def test_other_names_are_never_asked_for(plugin: Plugin) -> None:
    names = ["example.com", "deep.api.example.com", "other.example.org", "secret.data.attacker.example"]
    assert set(tried(plugin, *((name, 2525) for name in names))) == {"unknown"}
    assert set(plugin.internet.questions()) == {"ipv4.example.com"}


def test_names_that_lead_where_no_name_may(plugin: Plugin) -> None:
    names = ["inside", "alias-inside", "loop", "metadata", "self"]
    listed = [f"{name}.example.com" for name in names]
    targets = [CONTROL, *((name, 2525) for name in listed)]
    ran = plugin.python([*LISTED, *(f"{name}:2525" for name in listed)], TRY, json.dumps(targets))
    first, *others = json.loads(ran.stdout)
    assert first == REACHED and set(others) <= {"ECONNRESET", "ECONNREFUSED", "closed"}
    assert plugin.internet.connections() == [API]
    refused = [each for each in ran.network["connections"] if each["verdict"] != "allowed"]
    # One for each address that the plugin tries: it goes on to the next if the first connection fails.
    assert {each["name"] for each in refused} == set(listed) and all(each["reason"] for each in refused)


def test_private_addresses_by_policy(plugin: Plugin) -> None:
    network = 'ceiling = "open"\nhosts = ["*:*"]\nprivate = "allow"'
    ran = plugin.python(["inside.example.com:2525"], LINE, "inside.example.com", "2525", network=network)
    assert ran.stdout == f"220 {PRIVATE}\n", ran.network


KAGED = {
    "name": "words",
    "version": "1.0.0",
    "kaged_api": 1,
    "description": "Connects.",
    "tools": [{"name": "none", "description": "None.", "parameters_schema": {"type": "object"}}],
}
ADDRESS_WORDS = {
    "mcp": ("mcp.json", {"mcpServers": {"demo": {"command": "./words", "x-sandbox": {"network": ["WORD"]}}}}),
    "kaged": ("kaged-plugin.yaml", {**KAGED, "command": ["./words"], "capabilities": ["net:WORD"]}),
}


@one_case("contract", ADDRESS_WORDS)
def test_a_manifest_that_names_a_private_address_itself(plugin: Plugin, contract: str) -> None:
    """A ceiling that lets it name every host is not the operator's word for the local network."""
    name, document = ADDRESS_WORDS[contract]
    plugin.internet.look()
    script = f"#!/usr/bin/python3 -I\nimport sys\nsys.argv[1:] = ['{PRIVATE}', '2525']\n{LINE}"
    plugin.write(plugin.folder / "words", script, mode=0o755)
    text = json.dumps(document).replace("WORD", f"{PRIVATE}:2525")
    manifest = plugin.write(plugin.folder / name, text)
    refusing = 'ceiling = "open"\nhosts = ["*:*"]\nprivate = "deny"'
    done = plugin.caller("exec", "--policy", plugin.policy(refusing), manifest)
    assert done.returncode == 126 and "network_hosts" in done.stderr, done.stderr
    assert plugin.internet.connections() == []
    told = plugin.caller("explain", "--network", "--policy", plugin.policy(refusing), manifest).stdout
    assert f"REFUSED {PRIVATE}:2525: it is private" in told
    listing = f'ceiling = "open"\nhosts = ["{PRIVATE}:2525"]\nprivate = "deny"'
    for network in (listing, refusing.replace('private = "deny"', 'private = "allow"')):
        done = plugin.caller("exec", "--policy", plugin.policy(network), manifest)
        assert done.stdout == f"220 {PRIVATE}\n", done.stderr


def test_a_name_that_is_bound_to_another_address_later(plugin: Plugin) -> None:
    target = ("rebinding.example.com", 2525)
    ran = plugin.python(["rebinding.example.com:2525"], TRY, json.dumps([target] * 3))
    assert json.loads(ran.stdout)[1:] != [f"220 {PRIVATE}"] * 2
    assert PRIVATE not in plugin.internet.connections()


def test_only_addresses_that_may_be_dialled_are(plugin: Plugin) -> None:
    ran = plugin.python(["mixed.example.com:2525"], LINE, "mixed.example.com", "2525")
    assert ran.stdout == f"220 {API}\n" and plugin.internet.connections() == [API]


DATAGRAM = """
import errno, json, socket, sys
found = []
for host, port in json.loads(sys.argv[1]):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(20)
        try:
            sock.connect((host, port))
            sock.send(bytes.fromhex("123401000001000000000000036170690765786d706c6503636f6d0000010001"))
            found.append(len(sock.recv(512)) and "answered")
        except TimeoutError:
            found.append("TIMEOUT")
        except OSError as error:
            found.append(errno.errorcode[error.errno])
for kind in (socket.SOCK_RAW, socket.SOCK_DGRAM):
    try:
        socket.socket(socket.AF_INET, kind, socket.IPPROTO_ICMP)
        found.append("made")
    except OSError:
        found.append("refused")
print(json.dumps(found))
"""


def test_datagrams_and_other_resolvers(plugin: Plugin) -> None:
    targets = [("127.0.0.1", 53), ("ipv4.example.com", 2525), ("ipv4.example.com", 53), ("8.8.8.8", 53)]
    ran = plugin.python(["ipv4.example.com:2525"], DATAGRAM, json.dumps(targets))
    assert json.loads(ran.stdout) == [
        *("answered", "ECONNREFUSED", "ECONNREFUSED", "ENETUNREACH"),
        *("refused", "refused"),  # raw packets
    ]


def test_an_empty_list_is_refused_and_none_is_no_network(plugin: Plugin) -> None:
    ran = plugin.python("none", TRY, json.dumps([CONTROL]))
    assert json.loads(ran.stdout) == ["unknown"] and plugin.internet.questions() == []


HTTP = """
import json, socket, sys
for request in json.loads(sys.argv[2]):
    with socket.create_connection((sys.argv[1], 80), 20) as line:
        try:
            line.sendall(request.encode())
            print(line.recv(100)[:15])
        except ConnectionResetError:
            print("reset")
"""


REQUESTS = {
    "GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n": True,
    "GET / HTTP/1.1\r\nHost: API.example.com:80\r\n\r\n": True,
    "GET / HTTP/1.1\r\nHost: other.example.org\r\n\r\n": False,
    "GET / HTTP/1.1\r\nHost: api.example.com\r\nHost: other.example.org\r\n\r\n": False,
    "GET http://other.example.org/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n": False,
    "GET / HTTP/1.1\r\n\r\n": False,
}


def test_the_name_in_clear_text_has_to_match(plugin: Plugin) -> None:
    ran = plugin.python(["api.example.com:80"], HTTP, "api.example.com", json.dumps([*REQUESTS]))
    reached = ["HTTP/1.1 200 OK" in said for said in ran.stdout.splitlines()]
    assert reached == [*REQUESTS.values()], (ran.stdout, ran.process.stderr)
    # The listed server may have been dialled for the others, but nobody spoke to it.
    assert len(plugin.internet.requests()) == reached.count(True)


def test_two_plugins_do_not_reach_each_others_hosts(plugin: Plugin) -> None:
    one = plugin.python(["ipv4.example.com:2525"], LINE, "ipv4.example.com", "2525")
    other = plugin.python(["other.example.org:2525"], LINE, "ipv4.example.com", "2525")
    assert one.stdout == f"220 {API}\n" and other.stdout == ""
    assert set(other.verdicts("questions")) == {("ipv4.example.com", 0, "refused")}


def test_a_failure_after_a_refusal_names_the_host_and_the_remedy(plugin: Plugin) -> None:
    ran = plugin.python(LISTED, LINE, "other.example.org", "2525")
    assert ran.process.returncode == 1
    assert "the plugin asked for the host other.example.org, which is not in its list" in ran.process.stderr


def test_what_is_asked_again_and_again_is_counted(plugin: Plugin) -> None:
    ran = plugin.python(LISTED, TRY, json.dumps([CONTROL, *[("other.example.org", 2525)] * 5]))
    lines = [each for each in ran.network["questions"] if each["verdict"] == "refused"]
    asked = ran.network["totals"]["questions"]["refused"]
    assert asked >= 5 and len(lines) < asked and max(each["times"] for each in lines) >= 4
