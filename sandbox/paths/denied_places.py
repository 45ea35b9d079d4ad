"""What a denylist is made of, and the denylist of a launch from a stored plan, which seldom needs one.

The denylist itself (denylist.py) is not imported before it is needed.
"""

from __future__ import annotations

from sandbox.paths.guarded import GuardedName, guarded_table
from sandbox.paths.mounts import Mounts
from sandbox.speed.typed import TYPE_CHECKING, Any
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.paths.denylist import Denylist
else:
    Denylist = object  # what it has of one, it takes from the one that it makes


class DeniedPlaces(NamedTuple):
    """What a denylist is made of, beside its constants and the mounts. As plain values: a plan that is stored
    has them."""

    homes: tuple[str, ...] = ()
    policy: tuple[str, ...] = ()  # denied like the constants, as `runner` is
    runner: tuple[str, ...] = ()
    states: tuple[str, ...] = ()  # folders of state directories, which are `runner`'s too
    # The runner's own code and bwrap, and manifest and policy: denied only for writing.
    protected: tuple[str, ...] = ()
    deciding: tuple[str, ...] = ()
    # What hosts store for plugins: denied like the constants, but a folder that contains it may be read.
    storage: tuple[str, ...] = ()
    runtime_dir: str | None = None  # $XDG_RUNTIME_DIR
    tokens: tuple[str, ...] = ()  # more files with credentials in homes
    # Folders below one of `runner` that the plugin may read: the checked copy of its package, and what is
    # stored of it.
    copies: tuple[str, ...] = ()
    # Names of hosts that stay read-only in a writable folder, as those of version control do then.
    guarded: tuple[GuardedName, ...] = ()


class LaterDenylist(Denylist):
    """Identifies its paths when it is first asked about one. A launch from a stored plan has to ask only
    about files with several names: nothing has changed for the others."""

    def __init__(self, mounts: Mounts, places: DeniedPlaces) -> None:
        self.mounts, self._places = mounts, places
        self.guarded_names = guarded_table(places.guarded)
        self._made: Denylist | None = None

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            from sandbox.paths.denylist import Denylist

            self._made = Denylist(self.mounts, **self._places._asdict())
        return getattr(self._made, name)
