"""Who may use the page: one-time codes, and the sessions that they begin.

A session has two secrets. The cookie is kept from scripts, but a browser sends it to every port of a machine,
so that a server of somebody else on 127.0.0.1 can see it. The key is a header that the page sends: it is in
storage that belongs to the port, and no other site can set it. Only digests of both are kept here.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import trio

from sandbox.files import replace_file, text_at

CODE_SECONDS = 60.0
UNUSED_SECONDS = 12 * 3600.0
LONGEST_SECONDS = 7 * 24 * 3600.0
MOST_CODES = 16
MOST_SESSIONS = 32
_SECRET_BYTES = 32
_MOST_STORED = 64 << 10


class SessionSecrets(NamedTuple):
    """What a browser gets at the beginning of a session, once."""

    cookie: str
    key: str


class PageSession:
    def __init__(self, key: str, begun: float, used: float) -> None:
        self.key = key  # the digest
        self.begun, self.used = begun, used
        self.scopes: set[trio.CancelScope] = set()  # of its requests
        self.ended = False

    def end(self) -> None:
        self.ended = True
        for scope in self.scopes:
            scope.cancel()

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Cancel the body when the session ends."""
        with trio.CancelScope() as scope:
            self.scopes.add(scope)
            try:
                if self.ended:
                    scope.cancel()
                yield
            finally:
                self.scopes.discard(scope)


class Sessions:
    def __init__(self, path: str = "", clock: Callable[[], float] = time.time) -> None:
        """`path`: a file in a private folder, so that sessions outlive the daemon. Empty: they do not."""
        self._path, self._clock = path, clock
        self._codes: dict[str, float] = {}  # the digest of each, and when it was made
        self._sessions: dict[str, PageSession] = {}  # by the digest of the cookie
        self._read()

    def __len__(self) -> int:
        return len(self._sessions)

    def make_code(self) -> str:
        """A code that begins one session within a minute. Of many, the newest count."""
        code = secrets.token_urlsafe(_SECRET_BYTES)
        self._codes[_digest(code)] = self._clock()
        while len(self._codes) > MOST_CODES:
            del self._codes[next(iter(self._codes))]
        return code

    def begin(self, code: str) -> SessionSecrets | None:
        """Begin a session. None: the code was used, is too old, or never was one. Of many sessions, that
        which was unused longest ends."""
        made = self._codes.pop(_digest(code), None)
        if made is None or not 0 <= self._clock() - made <= CODE_SECONDS:
            return None
        self.end_expired()
        while len(self._sessions) >= MOST_SESSIONS:
            self._drop(min(self._sessions, key=lambda each: self._sessions[each].used))
        given = SessionSecrets(secrets.token_urlsafe(_SECRET_BYTES), secrets.token_urlsafe(_SECRET_BYTES))
        now = self._clock()
        self._sessions[_digest(given.cookie)] = PageSession(_digest(given.key), now, now)
        self._write()
        return given

    def find(self, cookie: str, key: str) -> PageSession | None:
        """The session that has these two secrets. It counts as used."""
        found = self._sessions.get(_digest(cookie))
        if found is None or not hmac.compare_digest(found.key, _digest(key)):
            return None
        if self._expired(found):
            self.end_expired()
            return None
        found.used = self._clock()
        return found

    def end(self, session: PageSession) -> None:
        for name in [name for name, each in self._sessions.items() if each is session]:
            self._drop(name)
        self._write()

    def end_all(self) -> int:
        """End all sessions with their requests, and forget all codes. Returns how many there were."""
        count = len(self._sessions)
        self._codes.clear()
        for name in list(self._sessions):
            self._drop(name)
        self._write()
        return count

    def end_expired(self) -> None:
        """End those whose time is over. Those with a request that still runs are in use."""
        for session in self._sessions.values():
            if session.scopes:
                session.used = self._clock()
        over = [name for name, session in self._sessions.items() if self._expired(session)]
        for name in over:
            self._drop(name)
        if over:
            self._write()

    def _drop(self, name: str) -> None:
        self._sessions.pop(name).end()

    def _expired(self, session: PageSession) -> bool:
        # A clock that was set back ends it: nobody knows how old it is.
        now = self._clock()
        return not (0 <= now - session.used <= UNUSED_SECONDS and 0 <= now - session.begun <= LONGEST_SECONDS)

    # --- the file -------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            rows = json.loads(text_at(self._path, _MOST_STORED)) if self._path else []
            found = {str(cookie): (str(key), float(begun)) for cookie, key, begun in rows[:MOST_SESSIONS]}
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return  # nobody is let in by it
        now = self._clock()
        self._sessions = {cookie: PageSession(key, begun, now) for cookie, (key, begun) in found.items()}
        self.end_expired()

    def _write(self) -> None:
        if not self._path:
            return
        rows = [(cookie, session.key, session.begun) for cookie, session in self._sessions.items()]
        try:
            folder = os.open(os.path.dirname(self._path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            replace_file(folder, os.path.basename(self._path), json.dumps(rows).encode())
        except OSError:
            # What is there might name sessions that have ended.
            try:
                os.unlink(os.path.basename(self._path), dir_fd=folder)
            except OSError:
                pass
        finally:
            os.close(folder)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
