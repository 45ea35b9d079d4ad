"""Paths of the host, as seen from one cage: whether the cage shows them, and whether an option could.

All of it by name. A launch also checks the files themselves.
"""

from __future__ import annotations

import errno
import os

from runner.launch.advice.scene import Scene
from sandbox.paths.denied_paths import (
    HOME_WRITE_PATHS,
    HOST_WRITE_PATHS,
    REASONS,
    SOCKET_PATHS,
    WHOLE_PATHS,
    denial_clause,
    lexical_fault,
    lexical_hit,
    normal,
)
from sandbox.paths.mounts import Mounts, contains, join, read_mounts
from sandbox.paths.walk import Link, Step, TooManyLinks, close, real_path, walk
from sandbox.spec import Access

# Every cage has folders of its own under these names.
_PRIVATE = ("/tmp", "/dev/shm")
_KERNELS = ("/proc", "/sys", "/dev")
# Not looked at: it may take long or mount something, and the plugin chooses the paths.
_REMOTE = frozenset(("autofs", "nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "afs", "fuse.sshfs", "davfs"))
# Folders that hold a large part of a machine: an approval of one stands out, and nothing proposes one.
WIDE_PATHS = ("/", "/etc", "/home", "/mnt", "/opt", "/srv", "/var", "/var/lib", "/media", "/run")


class _OnServer(Exception):
    """A path is on a filesystem that is not looked at."""


class CagePlaces:
    """Only looks whether paths exist: it opens nothing for reading."""

    def __init__(self, scene: Scene, mounts: Mounts | None = None) -> None:
        """`mounts`: of this machine."""
        self.scene = scene
        self._mounts = mounts

    def denial(self, path: str, access: Access) -> str:
        """Why no option grants it, as the second half of a sentence, or ''. By name only: a launch checks the
        file itself."""
        scene = self.scene
        hit = lexical_hit(path, scene.homes, scene.denied)
        if hit is not None:
            return hit.clause()
        if path in WHOLE_PATHS:
            return denial_clause("equal", path, "whole")
        homes = (join(home, rest) for home in scene.homes for rest in HOME_WRITE_PATHS)
        for denied in (*SOCKET_PATHS, *((*HOST_WRITE_PATHS, *homes) if access == "write" else ())):
            if contains(denied, path):
                return f"lies below {denied}, {REASONS['sockets' if denied in SOCKET_PATHS else 'execute']}"
        return ""

    def absolute(self, word: str) -> str | None:
        if word.startswith("~/") and self.scene.home.startswith("/"):
            word = self.scene.home + word[1:]
        if lexical_fault(word) is not None:
            return None
        return normal(word)

    def is_shown(self, path: str) -> bool:
        """Whether the cage shows the path, or has one of its own there."""
        scene = self.scene
        if path in ("/", *_PRIVATE) or any(contains(place, path) for place in scene.shown):
            return True
        private = any(contains(place, path) for place in _PRIVATE)
        return not private and any(contains(place, path) for place in _KERNELS)

    def is_writable(self, path: str) -> bool:
        """Whether the plugin can write there. The innermost folder decides: it may be read-only in a writable
        one."""
        scene = self.scene
        places = [place for place in (*scene.shown, *scene.writable) if contains(place, path)]
        return max(places, key=len, default="") in scene.writable

    def exists(self, path: str) -> bool:
        return self.is_local(path) and os.path.lexists(path)

    def is_local(self, path: str) -> bool:
        """Whether a look at the path, and at where its links lead, asks no server and mounts nothing."""
        passed: list[Link] = []
        try:
            # A step is opened by O_PATH, which does not mount what belongs there.
            close(walk(path, follow="all", check=self._require_local, missing=[], passed=passed))
        except (_OnServer, TooManyLinks):
            return False
        except OSError as error:
            # os.path.realpath goes on behind it, by the ".." of a link, and this walk may lack descriptors.
            return not passed and error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
        return True

    def _require_local(self, steps: list[Step], is_last: bool) -> None:
        if self._mounts is None:
            self._mounts = read_mounts()
        here = self._mounts.covering(real_path(steps))
        if any(mount.point != "/" and mount.fstype in _REMOTE for mount in here):
            raise _OnServer

    def is_folder(self, path: str) -> bool:
        return path != "/" and self.exists(path) and os.path.isdir(path)
