"""Python's `site`, run only when something needs it.

In a virtual environment the command `runner` starts without `site` (scripts/entry/runner-start). `site` reads
every .pth file there and executes what is in it, which takes several milliseconds. No package that we depend
on needs that. Some environments do: one with a dependency that is installed as editable, or one that also
uses the packages of the system.
"""

import sys  # and no `from __future__`: importing that module costs every start more than this whole file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class LateSite:
    """The last finder in sys.meta_path: it is asked for modules that nobody else finds."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        # A part of a package, whose places are known. Or a module that the standard library tries and that is
        # never there: subprocess imports msvcrt, and copy imports Jython's org.
        if path is not None or name in sys.stdlib_module_names or name == "org":
            return None
        complete_search_path()
        for finder in sys.meta_path:
            if (spec := finder.find_spec(name, None, target)) is not None:
                return spec
        return None


def is_site_waiting() -> bool:
    return any(isinstance(finder, LateSite) for finder in sys.meta_path)


def complete_search_path() -> None:
    """Make sys.path what it is with `site`. Does nothing in a process that was started with `site`."""
    if not is_site_waiting():
        return
    # First of all: what a .pth file imports may be missing too.
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, LateSite)]
    # `site` expects them as they are in an interpreter without `site`, and sets them again. Otherwise it does
    # not find the packages of the system.
    sys.prefix, sys.exec_prefix = sys.base_prefix, sys.base_exec_prefix
    import site

    site.main()
