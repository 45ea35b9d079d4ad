"""The page of the door: its files, its sessions, and the stream of what it shows.

Its files are for everybody who can connect, because they tell nothing. All else needs a session, which
`runner ctl open` begins with a code. No request of a session writes an approval, a policy or a manifest.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from importlib.resources import files
from typing import Any

from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runner.serve.event_stream import EventStream
from runner.serve.page.board import Board
from runner.serve.page.sessions import CODE_SECONDS, PageSession, Sessions
from runner.serve.peer import PAGE, VISITOR, is_local
from runner.serve.refusal import Refused

KEY_HEADER = "runner-page"
MOST_STREAMS = 64
_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_OPEN = {*(("GET", path) for path in _FILES), ("POST", "/session")}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

Handler = Callable[[Request], Awaitable[Response]]
RequestHeaders = Mapping[str, list[str]]


class Page:
    def __init__(
        self, sessions: Sessions, board: Board, urls: tuple[str, ...], note: Callable[[str], None]
    ) -> None:
        """`urls`: where browsers find the page. `note`: a line of the audit about sessions."""
        self.sessions = sessions
        self._board = board
        self._urls = urls
        self._note = note
        self._streams = 0
        here = files("runner.serve.page")
        self._files = {path: (here / name).read_bytes() for path, (name, _) in _FILES.items()}

    # --- who calls ------------------------------------------------------------------------------------------

    def identify(self, scope: MutableMapping[str, Any], headers: RequestHeaders) -> str | None:
        """The caller, if the request is one of the page; None: it has to show something else. Puts its
        session into the scope's state. The Host header is right. Raises Refused."""
        method = scope["method"]
        if (method, scope["path"]) in _OPEN:
            return VISITOR
        cookie = _cookie(headers)
        keys = headers.get(KEY_HEADER, [])
        if headers.get("authorization") or (cookie is None and not keys):
            return None
        _require_same_origin(method, headers)
        if len(keys) != 1:
            raise Refused(403, "page_header", "a session's requests need the header Runner-Page")
        session = None if cookie is None else self.sessions.find(cookie, keys[0])
        if session is None:
            hint = "begin another with runner ctl open"
            raise Refused(401, "no_session", "the session has ended, or there was none", hint)
        scope["state"]["session"] = session
        return PAGE

    # --- for callers on the unix socket ---------------------------------------------------------------------

    def open(self) -> dict[str, object]:
        """A code, and where it can be used. Raises Refused."""
        if not self._urls:
            hint = "start the daemon with runner serve --http 127.0.0.1:8700 --token-file FILE"
            raise Refused(409, "no_http", "the daemon has no page: it does not listen on TCP", hint)
        code = self.sessions.make_code()
        return {"urls": [f"{url}#code={code}" for url in self._urls], "seconds": CODE_SECONDS}

    # --- routes ---------------------------------------------------------------------------------------------

    def routes(self) -> list[Route]:
        return [
            *(Route(path, self._file) for path in _FILES),
            Route("/session", self._begin, methods=["POST"]),
            Route("/session", self._end, methods=["DELETE"]),
            Route("/page/stream", self._stream),
        ]

    async def _file(self, request: Request) -> Response:
        path = request.scope["path"]
        if path not in _FILES:  # it has a line end, which the route lets pass
            raise HTTPException(404)
        return Response(self._files[path], headers=HEADERS, media_type=_FILES[path][1])

    async def _begin(self, request: Request) -> Response:
        headers = {name: request.headers.getlist(name) for name in request.headers}
        _require_same_origin("POST", headers)
        raw = await request.body()
        try:
            code = json.loads(raw)["code"]
        except (ValueError, TypeError, KeyError, RecursionError):
            code = None
        given = self.sessions.begin(code) if isinstance(code, str) else None
        if given is None:
            message = "the code is not valid: it was used before, or is older than a minute"
            raise Refused(403, "wrong_code", message, "get another with runner ctl open")
        self._note("a session of the page began")
        secure = headers["origin"][0].startswith("https:")
        name = ("__Host-" if secure else "") + _cookie_name(headers)
        value = f"{name}={given.cookie}; Path=/; HttpOnly; SameSite=Strict{'; Secure' * secure}"
        return Response(
            json.dumps({"key": given.key}),
            headers={"Set-Cookie": value, "Cache-Control": "no-store"},
            media_type="application/json",
        )

    async def _end(self, request: Request) -> Response:
        session: PageSession | None = request.scope["state"]["session"]
        if session is None:
            raise Refused(403, "page_only", "this ends the session that asks for it, and there is none")

        async def end() -> None:
            self.sessions.end(session)

        # Afterwards: it cancels the session's requests, of which this is one.
        return Response('{"ended": 1}', media_type="application/json", background=BackgroundTask(end))

    async def _stream(self, request: Request) -> Response:
        # It shows the calls of all callers, and the audit.
        caller: str = request.scope["state"]["caller"]
        if caller != PAGE and not is_local(caller):
            raise Refused(403, "page_only", "this is for sessions of the page", "runner ctl open begins one")
        if self._streams >= MOST_STREAMS:
            message = f"{MOST_STREAMS} pages are open, which is the most"
            raise Refused(429, "overloaded", message, "close some", retry_after=10)

        self._streams += 1

        def end() -> None:
            self._streams -= 1

        return EventStream(self._board.show, end)


def _require_same_origin(method: str, headers: RequestHeaders) -> None:
    """Exactly this page: another port of this machine is another origin, though cookies do not know ports."""
    origins, hosts = headers.get("origin", []), headers.get("host", [])
    named = [each.partition("://")[2].lower() for each in origins]
    same = len(named) == 1 and named == [each.lower() for each in hosts]
    site = headers.get("sec-fetch-site", ["same-origin"])
    needed = bool(origins) or method not in ("GET", "HEAD")
    if (needed and not same) or site != ["same-origin"]:
        raise Refused(403, "origin", "only the page itself may send this", "open it with runner ctl open")


def _cookie_name(headers: RequestHeaders) -> str:
    """With the port, because daemons on other ports of this machine have cookies of their own."""
    port = headers["host"][0].rpartition(":")[2]
    return f"runner-{port}" if port.isascii() and port.isdigit() else "runner"


def _cookie(headers: RequestHeaders) -> str | None:
    pairs = [pair.strip().partition("=") for line in headers.get("cookie", []) for pair in line.split(";")]
    name = _cookie_name(headers)
    found = {key: value for key, _, value in pairs}
    return found.get(f"__Host-{name}", found.get(name))
