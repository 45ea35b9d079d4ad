"""The host side: knows plugins and speaks their protocols. The sandbox itself is in sandbox/.

Programs import `runner` and use `open_plugin`, `run` and `call`. All public names are those of
runner/library.py, which is imported when the first of them is used: `runner exec` does not pay for trio.
`runner.aio` has the same names for programs on asyncio.
"""

TYPE_CHECKING = False  # as in typing, without importing it

__version__ = "0.2.0"

if TYPE_CHECKING:
    from runner import aio as aio
    from runner.library import *  # noqa: F403 -- exactly its __all__
else:  # hidden from type checkers: they would take any name for one that exists

    def __getattr__(name):
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module 'runner' has no attribute {name!r}")
        from importlib import import_module

        if name == "aio":
            return import_module("runner.aio")
        library = import_module("runner.library")
        if name == "__all__":
            return [*library.__all__, "__version__"]
        if name in library.__all__:
            return getattr(library, name)
        raise AttributeError(f"module 'runner' has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__getattr__("__all__")})
