"""The file of a JSON Schema in a package: read from inside the package only. What is read is what was judged:
its name is resolved once."""

from __future__ import annotations

import os
import stat
from typing import Any

from sandbox import look
from sandbox.document.diagnostic import Diagnostic, DocumentError
from sandbox.document.read import parse
from sandbox.paths.beneath import open_beneath

MOST_SCHEMA_BYTES = 1 << 20

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def read_schema(root: str, name: str) -> Any:
    """The schema as data. Raises OSError, ValueError for a name that no file can have, Escapes if a link on
    the way leads out of the package, and DocumentError if the file is not one that can be read as JSON."""
    path = os.path.join(root, name)
    return parse(path, _read_inside(root, name), "json", limit=MOST_SCHEMA_BYTES).data


def _read_inside(root: str, name: str) -> bytes:
    look.note_content(os.path.join(root, name))
    folder = os.open(root, _FOLDER)
    try:
        inside = open_beneath(folder, name, (root, look.realpath(root)))
    finally:
        os.close(folder)
    try:
        if not stat.S_ISREG(os.fstat(inside).st_mode):
            message = "a schema has to be a regular file"
            raise DocumentError(Diagnostic(os.path.join(root, name), 0, 0, "not_a_file", message))
        file = os.open(f"/proc/self/fd/{inside}", _READ)
    finally:
        os.close(inside)
    with open(file, "rb") as stream:
        return stream.read(MOST_SCHEMA_BYTES + 1)
