"""Where a person's sign-ins at servers elsewhere are kept: a file for each, which only its owner can read.

They are beside the approvals, in a folder that no plugin is given. A sign-in belongs to the name and the URL
of its server: its token is sent nowhere else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from runner.approvals.files import locked_folder, open_folder, read_bytes
from runner.approvals.record import ApprovalsUnusable, approvals_folder
from sandbox.cache import fingerprint
from sandbox.files import replace_file

_FOLDER = "logins"  # beside the approvals
_FILE = "login.json"
_VERSION = 1
_MOST_BYTES = 1 << 20
_WHAT, _FOLDER_WHAT = "the sign-in", "the folder of a sign-in"


class Login(NamedTuple):
    """What the SDK needs to go on with a sign-in, as JSON objects of its models."""

    client: Mapping[str, Any]  # as the authorization server knows us
    token: Mapping[str, Any]
    expires: float | None  # seconds since 1970
    server: Mapping[str, Any] | None = None  # metadata of the authorization server
    resource: Mapping[str, Any] | None = None  # metadata of the server itself
    number: str = ""  # another one for each sign-in, and not for each token


class LoginRecord:
    def __init__(self, name: str, url: str, environ: Mapping[str, str]) -> None:
        """Raises ApprovalsUnusable without a home."""
        approvals = approvals_folder(environ)
        if approvals is None:
            message = "there is no place for sign-ins: HOME is not the path of a folder"
            raise ApprovalsUnusable(message, "set HOME, or XDG_CONFIG_HOME")
        self._owner = {"name": name, "url": url}
        folder = fingerprint(name.encode(), url.encode())[:40]
        self._folder = os.path.join(os.path.dirname(approvals), _FOLDER, folder)
        self._path = os.path.join(self._folder, _FILE)

    def read(self) -> Login | None:
        """None: nobody has signed in. Raises ApprovalsUnusable."""
        if not os.path.lexists(self._path):
            return None
        remedy = f"remove it (rm {self._path}), and sign in again"
        raw = read_bytes(self._path, _WHAT, _MOST_BYTES, remedy)
        if os.stat(self._path).st_mode & 0o077:
            message = f"{_WHAT} {self._path} is not used: others than its owner can read it"
            raise ApprovalsUnusable(message, remedy)
        try:
            data = json.loads(raw)
            if data.pop("version") != _VERSION or {key: data.pop(key) for key in self._owner} != self._owner:
                raise ValueError("it is of another version, or about another server than its name says")
            return Login(**data)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            message = f"{_WHAT} {self._path} is damaged: {str(error)[:200]}"
            raise ApprovalsUnusable(message, remedy) from None

    def locked(self) -> AbstractContextManager[None]:
        """Lets nobody else who asks so change it. A refresh token may be good for one use: two gateways must
        not use it at once. Raises ApprovalsUnusable."""
        return locked_folder(self._folder, _FOLDER_WHAT)

    def write(self, login: Login) -> None:
        """Raises ApprovalsUnusable. To be called while it is locked."""
        raw = json.dumps({"version": _VERSION, **self._owner, **login._asdict()}).encode() + b"\n"
        if len(raw) > _MOST_BYTES:
            raise ApprovalsUnusable("what the server sent is too much to be kept as a sign-in", "")
        with open_folder(self._folder) as directory:
            replace_file(directory, _FILE, raw, sync=True)

    def remove(self) -> bool:
        """Returns False if nobody has signed in. Raises ApprovalsUnusable."""
        if not os.path.lexists(self._path):
            return False
        with self.locked(), open_folder(self._folder) as directory:
            try:
                os.unlink(_FILE, dir_fd=directory)
            except FileNotFoundError:
                return False
            os.fsync(directory)
        return True
