"""What the last lines of stderr name: a table of what real programs write."""

from __future__ import annotations

import pytest

from runner.launch.advice.clues import MOST_CHARACTERS, MOST_LINES, PathClue, read_clues

NODE = "Error: getaddrinfo ENOTFOUND api.github.com"
URLLIB3 = (
    "ConnectionError: HTTPSConnectionPool(host='api.github.com', port=443): Max retries "
    'exceeded with url: / (Caused by NameResolutionError("<urllib3 object>: Failed to resolve '
    "'api.github.com' ([Errno -2] Name or service not known)\"))"
)


@pytest.mark.parametrize(
    ("line", "hosts"),
    [
        (NODE, [("api.github.com", 443)]),
        ("getaddrinfo EAI_AGAIN registry.npmjs.org registry.npmjs.org:80", [("registry.npmjs.org", 443)]),
        ("curl: (6) Could not resolve host: example.com", [("example.com", 443)]),
        (
            "fatal: cannot access 'http://git.example.com:8080/x/': Could not resolve host: git.example.com",
            [("git.example.com", 8080)],
        ),
        (URLLIB3, [("api.github.com", 443)]),
        (
            "aiohttp: Cannot connect to host api.example.com:8443 ssl:default [Name or service not known]",
            [("api.example.com", 8443)],
        ),
        ("wget: unable to resolve host address ‘example.org’", [("example.org", 443)]),
        ("dial tcp: lookup api.example.com on 127.0.0.1:53: no such host", [("api.example.com", 443)]),
        ("java.net.UnknownHostException: db.example.com", [("db.example.com", 443)]),
        (
            "error sending request for url (https://pypi.org/simple): failed to lookup address information",
            [("pypi.org", 443)],
        ),
        # The controls: a URL alone is no failure, and neither is a host without a word about it.
        ("listening on http://example.com:3000", []),
        ("see https://example.com/docs for help", []),
    ],
)
def test_hosts(line: str, hosts: list[tuple[str, int]]) -> None:
    assert list(read_clues(line).hosts) == hosts


@pytest.mark.parametrize(
    ("line", "ports"),
    [
        ("Redis Client Error: Error: connect ECONNREFUSED 127.0.0.1:6379", [6379]),
        ("AggregateError [ECONNREFUSED]: connect ECONNREFUSED ::1:27017", [27017]),
        (
            "redis.exceptions.ConnectionError: Error 111 connecting to localhost:6379. Connection refused.",
            [6379],
        ),
        ('connection to server at "localhost" (127.0.0.1), port 5432 failed: Connection refused', [5432]),
        ('connection to server at "::1", port 5432 failed: Connection refused', [5432]),
        ("ConnectionRefusedError: [Errno 111] Connect call failed ('127.0.0.1', 5432)", [5432]),
        ("localhost:27017: [Errno 111] Connection refused (configured timeouts: …)", [27017]),
        ("ResolvedIPv4Address(('127.0.0.1', 7687)) (reason [Errno 111] Connection refused)", [7687]),
        ("dial tcp [::1]:6379: connect: connection refused", [6379]),
        ("HTTPConnectionPool(host='localhost', port=11434): … [Errno 111] Connection refused'))", [11434]),
        ("curl: (7) Failed to connect to localhost port 11434 after 0 ms: Couldn't connect", [11434]),
        ("Can't connect to MySQL server on 'localhost:3306' (111)", [3306]),
        ("Connection to localhost:5432 refused. Check that the hostname and port are correct", [5432]),
        # The controls: no refusal, another machine's, and the cage's own name server.
        ("listening on http://localhost:3000", []),
        ("connect ECONNREFUSED 10.127.0.0.1:99", []),
        ("connect ECONNREFUSED 192.0.2.1:6379", []),
        ("connect ECONNREFUSED db-localhost:6379", []),
        ("connect ECONNREFUSED 127.0.0.1:66666", []),
        ("lookup x.example on 127.0.0.1:53: read udp: connection refused", []),
    ],
)
def test_ports_of_its_own_loopback(line: str, ports: list[int]) -> None:
    assert list(read_clues(line).closed) == ports


@pytest.mark.parametrize(
    ("line", "paths"),
    [
        ("Error: ENOENT: no such file or directory, open '/srv/data/x.json'", ["/srv/data/x.json"]),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/srv/a b.txt'", ["/srv/a b.txt"]),
        ("cat: /srv/x: No such file or directory", ["/srv/x"]),
        ("config=/etc/app.toml not found", ["/etc/app.toml"]),
        ("    at file:///opt/app/index.js:12:3", ["/opt/app/index.js"]),
        ("looked in ~/notes.", ["~/notes"]),
        ("failed: (/srv/one,/srv/two)", ["/srv/one", "/srv/two"]),
        ("ls: cannot access ‘/srv/q’: No such file", ["/srv/q"]),
        ("a/b and https://example.com/srv/x are no absolute paths", []),
        ("and/or", []),
        ("'/" + "x" * 5000 + "'", []),
    ],
)
def test_paths(line: str, paths: list[str]) -> None:
    found = [path for clue in read_clues(line).paths for path in clue.paths]
    assert set(paths) <= set(found)
    assert bool(paths) == bool(found)


@pytest.mark.parametrize(
    ("line", "written", "read_only"),
    [
        ("Error: EROFS: read-only file system, mkdir '/srv/x'", True, True),
        ("OSError: [Errno 30] Read-only file system: '/srv/x'", True, True),
        ("Error: EACCES: permission denied, mkdir '/srv/x'", True, False),
        ("PermissionError: [Errno 13] Permission denied: '/srv/x'", False, False),
        ("ENOENT: no such file or directory, open '/srv/x'", False, False),
    ],
)
def test_whether_it_was_to_be_written(line: str, written: bool, read_only: bool) -> None:
    assert read_clues(line).paths == (PathClue(("/srv/x",), written, read_only),)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("Error: GITHUB_TOKEN environment variable not set", ["GITHUB_TOKEN"]),
        ("KeyError: 'SLACK_BOT_TOKEN'", ["SLACK_BOT_TOKEN"]),
        ("Please set BRAVE_API_KEY and OPENAI_API_KEY", ["BRAVE_API_KEY", "OPENAI_API_KEY"]),
        ("DATABASE_URL is required", ["DATABASE_URL"]),
        ("GITHUB_TOKEN was used", []),
    ],
)
def test_variables(line: str, names: list[str]) -> None:
    assert list(read_clues(line).names) == names


def test_only_the_end_is_read() -> None:
    """What a plugin writes before that costs nothing, and says nothing."""
    assert read_clues(f"{NODE}\n" + "x\n" * MOST_LINES).hosts == ()
    assert read_clues(f"{NODE}\n" + "x\n" * (MOST_LINES - 1)).hosts == (("api.github.com", 443),)
    assert read_clues(f"{NODE}\n" + "x" * MOST_CHARACTERS).hosts == ()
    many = "\n".join(f"open '/srv/{n}'  '/srv/a{n}' '/srv/b{n}'" for n in range(60))
    assert len(read_clues(many).paths) == 32 and read_clues(many).paths[0].paths == ("/srv/59",)


@pytest.mark.parametrize(
    "piece",
    ["'", '"', "`", "‘", "/", "://", "https://", "getaddrinfo ENOTFOUND ", "A", "A_", "\0", "~/", "@"],
)
def test_hostile_lines_take_no_time(piece: str) -> None:
    """The bound of the test is the suite's own: a quadratic pattern would still be noticed by people."""
    read_clues(piece * MOST_CHARACTERS)
    read_clues(f"ENOTFOUND {piece * MOST_CHARACTERS}")
