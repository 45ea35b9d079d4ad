"""Sessions of the page: the values by themselves, and against a real door without a browser."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from runner.outcome import Advice
from runner.protocol.dialect import Notice
from runner.serve.page.board import Board
from runner.serve.page.page import HEADERS
from runner.serve.page.sessions import (
    CODE_SECONDS,
    LONGEST_SECONDS,
    MOST_CODES,
    MOST_SESSIONS,
    UNUSED_SECONDS,
    Sessions,
)
from sandbox.network.egress import AuditLine
from tests.runner.serve.house import TOKEN, House, code, house, request, status


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_a_code_begins_one_session_within_a_minute() -> None:
    clock = Clock()
    sessions = Sessions(clock=clock)
    made = sessions.make_code()
    assert len(made) >= 43  # 256 bits
    given = sessions.begin(made)
    assert given is not None and sessions.begin(made) is None
    assert sessions.find(given.cookie, given.key) is not None
    assert sessions.find(given.cookie, given.cookie) is None and sessions.find(given.key, given.key) is None
    assert sessions.begin("") is None and sessions.begin("\udcff") is None
    late, early = sessions.make_code(), sessions.make_code()
    clock.now += CODE_SECONDS
    assert sessions.begin(early) is not None
    clock.now += 0.1
    assert sessions.begin(late) is None
    # A clock that was set back makes no code valid again.
    made = sessions.make_code()
    clock.now -= 3600
    assert sessions.begin(made) is None


def test_sessions_end() -> None:
    clock = Clock()
    sessions = Sessions(clock=clock)

    def begin() -> Any:
        return sessions.begin(sessions.make_code())

    unused, used, set_back = begin(), begin(), begin()
    for _ in range(int(LONGEST_SECONDS / UNUSED_SECONDS)):
        clock.now += UNUSED_SECONDS - 1
        assert sessions.find(*used) is not None
    assert sessions.find(*unused) is None and len(sessions) == 1
    clock.now += LONGEST_SECONDS - int(LONGEST_SECONDS / UNUSED_SECONDS) * (UNUSED_SECONDS - 1)
    assert sessions.find(*used) is not None  # the last moment
    clock.now += 1
    assert sessions.find(*used) is None and len(sessions) == 0
    set_back = begin()
    clock.now -= 10
    assert sessions.find(*set_back) is None
    begin()
    waiting = sessions.make_code()
    assert sessions.end_all() == 1 and sessions.begin(waiting) is None


def test_a_thousand_sessions_and_codes() -> None:
    clock = Clock()
    sessions = Sessions(clock=clock)
    first = sessions.begin(sessions.make_code())
    assert first is not None
    began = []
    for _ in range(1000):
        clock.now += 1
        assert sessions.find(*first) is not None  # in use: another one gives way
        began.append(sessions.begin(sessions.make_code()))
    assert len(sessions) == MOST_SESSIONS and sessions.find(*first) is not None
    living = [each for each in began if each is not None and sessions.find(*each) is not None]
    assert living == began[-(MOST_SESSIONS - 1) :]
    codes = [sessions.make_code() for _ in range(1000)]
    assert len(sessions._codes) == MOST_CODES and sessions.begin(codes[0]) is None
    assert sessions.begin(codes[-1]) is not None


def test_sessions_outlive_the_daemon_and_a_bad_file_lets_nobody_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, path = Clock(), tmp_path / "sessions.json"
    sessions = Sessions(str(path), clock)
    given = sessions.begin(sessions.make_code())
    assert given is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert given.cookie not in path.read_text() and given.key not in path.read_text()
    assert Sessions(str(path), clock).find(*given) is not None
    good = path.read_text()
    clock.now += LONGEST_SECONDS + 1
    assert Sessions(str(path), clock).find(*given) is None
    clock.now -= LONGEST_SECONDS + 1
    path.write_text(good)
    for bad in (
        "",
        "[",
        "{}",
        '[["a"]]',
        '[[1, 2, "x"]]',
        good[:-3],
        "[" * 70_000,
        "null",
        '[["", "", 1e999]]',
    ):
        path.write_text(bad)
        assert len(Sessions(str(path), clock)) == 0, bad
    path.write_text(good)
    again = Sessions(str(path), clock)
    assert again.find(*given) is not None and again.end_all() == 1
    assert Sessions(str(path), clock).find(*given) is None  # the end is on the disk
    # Where it cannot be written, what is there must not bring back what has ended.
    path.write_text(good)
    again = Sessions(str(path), clock)
    monkeypatch.setattr("runner.serve.page.sessions.replace_file", _fails)
    again.end_all()
    assert len(Sessions(str(path), clock)) == 0


def _fails(*given: object, **more: object) -> None:
    raise OSError


# --- against the door ---------------------------------------------------------------------------------------


async def begin(door: House, made: str, *headers: str) -> bytes:
    host = f"127.0.0.1:{door.tcp}"
    given = headers or (f"Origin: http://{host}",)
    body = json.dumps({"code": made}).encode()
    return await door.ask(request("/session", f"Host: {host}", *given, method="POST", body=body), tcp=True)


async def made_code(door: House) -> str:
    raw = await door.ask(request("/session/codes", "Host: x", method="POST"))
    [url] = json.loads(raw.partition(b"\r\n\r\n")[2])["urls"]
    assert url.startswith(f"http://127.0.0.1:{door.tcp}/#code=")
    return str(url.partition("=")[2])


def secrets_of(raw: bytes) -> tuple[str, str]:
    head, _, body = raw.partition(b"\r\n\r\n")
    [line] = [each for each in head.decode().split("\r\n") if each.lower().startswith("set-cookie:")]
    return line.partition(":")[2].strip(), json.loads(body)["key"]


@pytest.mark.trio
async def test_the_door_knows_sessions(tmp_path: Path) -> None:
    async with house(tmp_path) as door:
        host, origin = f"Host: 127.0.0.1:{door.tcp}", f"Origin: http://127.0.0.1:{door.tcp}"
        made = await made_code(door)
        # Of another origin, of none, and by another site's page: the code is not used up by them.
        for wrong in (
            f"Origin: http://127.0.0.1:{door.tcp + 1}",
            "X: y",
            f"{origin}\r\nSec-Fetch-Site: same-site",
        ):
            assert code(await begin(door, made, wrong)) == "origin", wrong
        for bad in ("null", "wrong", '{"code": 1}', '{"code": "' + "x" * 2000 + '"}', "[" * 900):
            raw = request("/session", host, origin, method="POST", body=bad.encode())
            assert code(await door.ask(raw, tcp=True)) == "wrong_code", bad
        old = b"POST /session HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}"
        assert code(await door.ask(old)) == "origin"  # on the unix socket, with neither Host nor Origin
        # Who is not let in yet cannot fill the room for bodies.
        large = request("/session", host, origin, method="POST", body=b"x" * 5000)
        assert code(await door.ask(large, tcp=True)) == "body_too_large"
        parts = large.replace(b"Content-Length: 5000", b"Transfer-Encoding: chunked").replace(
            b"x" * 5000, b"1000\r\n" + b"x" * 4096 + b"\r\n1\r\nx\r\n"
        )
        assert code(await door.ask(parts, tcp=True)) == "body_too_large"
        began = await begin(door, made)
        assert status(began) == 200 and code(await begin(door, made)) == "wrong_code"
        cookie, key = secrets_of(began)
        pair, *rest = cookie.split("; ")
        assert pair.startswith(f"runner-{door.tcp}=") and rest == ["Path=/", "HttpOnly", "SameSite=Strict"]
        await check_requests(door, pair, key)
        # Behind TLS the cookie is bound to the host.
        secure = await begin(door, await made_code(door), f"Origin: https://127.0.0.1:{door.tcp}")
        pair, *rest = secrets_of(secure)[0].split("; ")
        assert pair.startswith(f"__Host-runner-{door.tcp}=") and rest[-1] == "Secure"
        shown = (host, f"Cookie: {pair}", f"Runner-Page: {secrets_of(secure)[1]}")
        assert status(await door.ask(request("/plugins", *shown), tcp=True)) == 200
        await check_ends(door, shown)


async def check_requests(door: House, pair: str, key: str) -> None:
    host, origin = f"Host: 127.0.0.1:{door.tcp}", f"Origin: http://127.0.0.1:{door.tcp}"
    cookie, header = f"Cookie: a=b; {pair}", f"Runner-Page: {key}"
    post: dict[str, Any] = {"method": "POST"}
    rows: list[tuple[bytes, int, str]] = [
        (request("/plugins", host, cookie, header), 200, ""),
        (request("/plugins", host, cookie), 403, "page_header"),
        (request("/plugins", host, header), 401, "no_session"),
        (request("/plugins", host, cookie, header + "x"), 401, "no_session"),
        (request("/plugins", host, cookie, header, header), 403, "page_header"),
        (request("/plugins", host, cookie, header, f"Origin: http://localhost:{door.tcp}"), 403, "origin"),
        (request("/plugins", host, cookie, header, "Sec-Fetch-Site: cross-site"), 403, "origin"),
        (request("/plugins", "Host: evil.example", cookie, header), 421, "host"),
        # What changes something needs the origin.
        (request("/plugins/none/stop", host, cookie, header, **post), 403, "origin"),
        (request("/plugins/none/stop", host, cookie, header, "Origin: null", **post), 403, "origin"),
        (request("/plugins/none/stop", host, cookie, origin, **post), 403, "page_header"),
        # It got as far as the plugins.
        *(
            (request(f"/plugins/none/{verb}", host, cookie, header, origin, **post), 404, "unknown_plugin")
            for verb in ("start", "stop", "reset", "reload")
        ),
        # What is for the unix socket only stays so.
        *(
            (request(path, host, cookie, header, origin, method=method), 403, "local_only")
            for method, path in (
                *(("POST", "/drain"), ("POST", "/reload"), ("GET", "/audit"), ("GET", "/deliveries")),
                *(("POST", "/session/codes"), ("DELETE", "/session/codes"), ("GET", "/plugins/x/explain")),
            )
        ),
        # The token works beside it, and is not made up for by a cookie.
        (request("/plugins", host, f"Authorization: Bearer {TOKEN.decode()}"), 200, ""),
        (request("/plugins", host, "Authorization: Bearer x", cookie, header), 401, "wrong_token"),
        (request("/plugins", host), 401, "wrong_token"),
        # Who has the token does not see what others call, nor the audit.
        (request("/page/stream", host, f"Authorization: Bearer {TOKEN.decode()}"), 403, "page_only"),
        (
            request("/session", host, f"Authorization: Bearer {TOKEN.decode()}", method="DELETE"),
            *(403, "page_only"),
        ),
        (request("/page.js%0A", host, f"Authorization: Bearer {TOKEN.decode()}"), 404, "no_route"),
        # The stream is not open, nor is anything beside the files, however it is written.
        (request("/page/stream", host), 401, "wrong_token"),
        (request("//", host), 401, "wrong_token"),
        (request("/session", host, method="DELETE"), 401, "wrong_token"),
        (request("/page.js/../plugins", host), 401, "wrong_token"),
    ]
    for raw, wanted, word in rows:
        found = await door.ask(raw, tcp=True)
        assert (status(found), code(found) if word else "") == (wanted, word), raw
    for path in ("/", "/page.css", "/page.js", "/icon.svg"):
        found = await door.ask(request(path, host), tcp=True)
        head = found.partition(b"\r\n\r\n")[0].decode()
        assert status(found) == 200 and "set-cookie" not in head.lower()
        assert all(f"{name.lower()}: {value}" in head for name, value in HEADERS.items()), head


async def check_ends(door: House, shown: tuple[str, ...]) -> None:
    """The end of a session ends its streams, at once."""
    async with await door.connect(tcp=True) as stream:
        await stream.send_all(request("/page/stream", *shown))
        told = b""
        while b"event: daemon" not in told or b"event: samples" not in told:
            told += await stream.receive_some(1 << 16)
        raw = await door.ask(request("/session/codes", "Host: x", method="DELETE"))
        assert json.loads(raw.partition(b"\r\n\r\n")[2]) == {"ended": 2}
        while await stream.receive_some(1 << 16):
            pass
    assert code(await door.ask(request("/plugins", *shown), tcp=True)) == "no_session"


@pytest.mark.trio
async def test_what_plugins_were_refused_is_on_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boards: list[Board] = []
    run = Board.run

    async def running(board: Board) -> None:
        boards.append(board)
        await run(board)

    monkeypatch.setattr(Board, "run", running)
    async with house(tmp_path) as door:
        cookie, key = secrets_of(await begin(door, await made_code(door)))
        host = f"Host: 127.0.0.1:{door.tcp}"
        [board] = boards
        line = AuditLine("connect", "x.example", 443, "refused", reason="it is not allowed")
        board.hear("notes", Notice("network", line._asdict()))
        for command in ("runner allow /n --net x.example", "runner allow /n\x1b[2J", "x" * 5000):
            told = Advice("host", f"x.example was refused{'!' * 3000}", "--net x.example", command)
            board.hear("notes", Notice("advice", told._asdict()))
        board.hear(
            "notes", Notice("published", {"kind": "advice", "command": "rm -rf /"})
        )  # the plugin's own
        board.questions = lambda: [{"plugin": "notes", "tool": "t", "change": "c", "command": "d"}] * 1000
        async with await door.connect(tcp=True) as stream:
            await stream.send_all(
                request("/page/stream", host, f"Cookie: {cookie.split(';')[0]}", f"Runner-Page: {key}")
            )
            told_raw = b""
            while b"event: connections" not in told_raw or not told_raw.endswith(b"\n\n\r\n"):
                told_raw += await stream.receive_some(1 << 16)
        found = {
            block.split("\n")[0]: json.loads(block.split("\ndata: ")[1].split("\n")[0])
            for block in told_raw.decode().split("event: ")[1:]
        }
        assert [each["command"] for each in found["refusals"]] == ["", "", "runner allow /n --net x.example"]
        assert all(len(each["what"]) < 2100 and each["plugin"] == "notes" for each in found["refusals"])
        assert [each["name"] for each in found["connections"] if "name" in each] == ["x.example"]
        assert len(found["questions"]) == 50


@pytest.mark.trio
async def test_a_session_signs_out(tmp_path: Path) -> None:
    async with house(tmp_path) as door:
        cookie, key = secrets_of(await begin(door, await made_code(door)))
        origin = f"Origin: http://127.0.0.1:{door.tcp}"
        shown = (f"Host: 127.0.0.1:{door.tcp}", f"Cookie: {cookie.split(';')[0]}", f"Runner-Page: {key}")
        gone = await door.ask(request("/session", *shown, origin, method="DELETE"), tcp=True)
        assert status(gone) == 200
        assert code(await door.ask(request("/plugins", *shown), tcp=True)) == "no_session"


@pytest.mark.trio
async def test_a_daemon_without_tcp_has_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.serve.daemon import Daemon

    monkeypatch.setattr(Daemon, "_urls", lambda self: iter(()))
    async with house(tmp_path) as door:
        raw = await door.ask(request("/session/codes", "Host: x", method="POST"))
        assert (status(raw), code(raw)) == (409, "no_http") and b"--http" in raw
