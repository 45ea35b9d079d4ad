"""Contents: what a launch writes into the memory files of its cage.

It is passed between processes in sealed memory files. No plan, cache, argument, variable or report has it.
"""

from __future__ import annotations

import fcntl
import os

from sandbox.files import write_all
from sandbox.spec import MemoryFile
from sandbox.speed.typed import Mapping, Sequence

MOST_SECRET_BYTES = 1 << 20  # of all secrets together. They are keys and tokens
MOST_FILE_BYTES = 64 << 20  # of all other files together

_SHORTEST_SECRET = 8  # a shorter text is part of others by accident

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class Contents:
    """Secrets by name, and other files by their path in the cage. `repr` shows none of the values."""

    def __init__(
        self,
        secrets: Mapping[str, bytes] | None = None,
        files: Mapping[str, bytes] | None = None,
        hidden: Mapping[str, bytes] | None = None,
    ) -> None:
        """`hidden`: values of credentials that the plugin does not get, by the names of their variables.
        Raises ValueError if the contents are too large."""
        self.secrets = dict(secrets or {})
        self.files = dict(files or {})
        self.hidden = dict(hidden or {})
        for what, given, most in (
            ("the secrets", self.secrets, MOST_SECRET_BYTES),
            ("the files in memory", self.files, MOST_FILE_BYTES),
        ):
            if sum(map(len, given.values())) > most:
                raise ValueError(f"{what} are more than {most >> 20} MiB together")

    def __bool__(self) -> bool:
        return bool(self.secrets or self.files)

    def __repr__(self) -> str:
        return f"<contents of {len(self.secrets)} secrets and {len(self.files)} files>"

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("the contents of memory files are not stored")

    def of(self, file: MemoryFile) -> bytes | None:
        return self.secrets.get(file.secret) if file.secret else self.files.get(file.dest)

    def wipe(self) -> None:
        """Overwrite all secrets, in a forked child that needs none. In place, because stack frames inherited
        from the launching process refer to them too."""
        if self.hidden:  # first: a file may have the same value
            _scrub_memory(list(self.hidden.values()))
            self.hidden.clear()
        self.wipe_files()

    def wipe_files(self) -> None:
        """The same, but for what is hidden: in a child that needs that."""
        _overwrite(self.secrets)
        self.files.clear()

    def wipe_of_others(self, environ: Mapping[bytes, bytes]) -> None:
        """For a process that needs what is hidden here: overwrite the secrets of other plugins, as far as
        they are in the environment."""
        from sandbox.network.credentials import looks_secret

        self.wipe_files()
        own = self.hidden.values()
        others = {
            value
            for name, value in environ.items()
            if looks_secret(os.fsdecode(name)) and len(value) >= _SHORTEST_SECRET
            if not any(value in each or each in value for each in own)
        }
        if others:
            _scrub_memory(list(others))

    def strays(self, files: Sequence[MemoryFile]) -> list[str]:
        """The names of contents that no file asks for."""
        known = {file.secret or file.dest for file in files}
        return [name for name in (*self.secrets, *self.files) if name not in known]

    def share(self) -> int:
        """Write a sealed memory file, which another process reads with `read_contents`."""
        if not self:
            return sealed_file(b"")
        import json  # not every launch pays for it

        sizes = [{name: len(value) for name, value in part.items()} for part in (self.secrets, self.files)]
        head = json.dumps(sizes).encode()
        return sealed_file(b"".join((head, b"\n", *self.secrets.values(), *self.files.values())))


def _overwrite(secrets: dict[str, bytes]) -> None:
    for value in secrets.values():
        if len(value) > 1:  # Python shares shorter ones
            _clear(id(value) + bytes.__basicsize__ - 1, len(value))
    secrets.clear()


def _clear(address: int, size: int) -> None:
    from sandbox.speed.libc import memory_at

    memory_at(address, size).raw = bytes(size)


def _scrub_memory(values: list[bytes]) -> None:
    """Overwrite all copies of these values in the memory of this process: they came with the environment, and
    Python has made others of them."""
    from sandbox.speed.libc import MachineWord, addressof, open_libc, writable

    find = open_libc().pointer("memmem")
    sought = []
    for value in values:
        # As text, too: a character takes two bytes where the text has others than Latin ones.
        for form in (value, value.decode("latin-1").encode("utf-16-le")):
            sought.append(writable(len(form)))
            sought[-1].raw = form
    own = {addressof(each) for each in sought}
    with open("/proc/self/maps", "rb") as file:
        lines = file.read().splitlines()
    for line in lines:
        place, rights, _ = line.split(b" ", 2)
        if not rights.startswith(b"rw") or not rights.endswith(b"p"):  # shared memory is not ours alone
            continue
        start, end = (int(each, 16) for each in place.split(b"-"))
        found = []
        for each in sought:
            at = start
            while at := find(MachineWord(at), MachineWord(end - at), each, MachineWord(len(each))) or 0:
                if at not in own:
                    found.append((at, len(each)))
                at += 1
        for at, size in found:
            _clear(at, size)
    for each in sought:
        each.raw = bytes(len(each))


def read_contents(fd: int) -> Contents:
    """Read what `share` wrote, and close the descriptor. Raises ValueError for anything else."""
    with open(fd, "rb") as file:
        file.seek(0)
        head, _, body = file.read().partition(b"\n")
    if not head:
        return Contents()
    import json

    parts: list[dict[str, bytes]] = []
    at = 0
    for sizes in json.loads(head):
        part = {}
        for name, size in sizes.items():
            part[name] = body[at : at + size]
            at += size
        parts.append(part)
    if at != len(body) or len(parts) != 2:
        raise ValueError("the contents of memory files are cut short")
    return Contents(*parts)


def sealed_file(content: bytes) -> int:
    """Make a memory file that cannot be changed any more, positioned at its beginning. Closed on exec."""
    fd = os.memfd_create("runner-contents", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        write_all(fd, content)
        os.lseek(fd, 0, os.SEEK_SET)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd
