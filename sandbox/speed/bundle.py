"""The modules of a launch or a call, compiled, in one or two files: to find and read sixty takes longer than
to run what is in them.

Python keeps the compiled code of a module in a folder `__pycache__` beside it. A bundle is in that folder
too, and is believed for the same reason: who can write there can also change the sources. It is used only if
each source is as it was, by time and size, in the place where it was. Otherwise the modules are imported as
usual, and the launch writes new bundles when it has ended.
"""

import sys  # and no `from __future__`: importing that module costs every start more than this whole file
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import MAGIC_NUMBER, SourceFileLoader, cache_from_source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType

# What a verb loads first.
_FIRST = {"exec": "launch", "run": "launch", "call": "call", "tools": "call", "explain": "explain"}
# The last module of a part that a process may have imported before. If it is there, so are the others.
_LAST = {"state": "sandbox.paths.access"}
_FORMAT = b"runner bundle 3\n"
_SIZE_BYTES = 4  # of the number behind the format: the bytes of the list of sources
_WRITABLE_BY_OTHERS = 0o022
# A source that changed so recently could change again without another time.
_SETTLED_SECONDS = 2.0
# The folder that holds runner/ and sandbox/.
_ROOT = __file__.removesuffix("/sandbox/speed/bundle.py")

_Source = tuple[str, bool, str, int, int]  # name, is it a package, its file, size, time

_asked: "set[str]" = set()  # parts that were loaded, or could not be: a monitor starts many plugins
_wanted: "list[str]" = []  # parts of which there is no bundle that fits


def load_for(verb: str) -> None:
    """Import what every start of this verb needs, but for its help."""
    if verb in _FIRST and sys.argv[2:] not in (["--help"], ["-h"]):
        load(_FIRST[verb])


def load(part: str) -> None:
    """Import the modules of a part from its bundle. If none fits, they are imported as usual later."""
    # Isolated: otherwise variables may have told Python where to find modules. And somebody who asks for the
    # times of the imports wants to see each.
    if not sys.flags.isolated or "importtime" in sys._xoptions:
        return
    if part in _asked or _LAST.get(part) in sys.modules:
        return
    _asked.add(part)
    import gc

    collects = gc.isenabled()
    gc.disable()  # while modules are made, nothing is garbage
    try:
        found = _read(part)
        if found is None:
            _wanted.append(part)
        for source, code in zip(*found, strict=True) if found is not None else ():
            if source[0] not in sys.modules:
                _run(*source, code)
    except Exception:  # noqa: BLE001 -- who needs the module imports it, and sees why that fails
        pass
    finally:
        if collects:
            gc.enable()


def expect(part: str) -> None:
    """See to it that there is a bundle of a part which another process of this launch loads."""
    if sys.flags.isolated and part not in _wanted and _read(part, code=False) is None:
        _wanted.append(part)


def _read(part: str, *, code: bool = True) -> "tuple[tuple[_Source, ...], tuple[CodeType, ...]] | None":
    """The sources of a bundle that fits, and their code if it is asked for."""
    from marshal import loads
    from posix import fstat, stat

    try:
        with open(_path(part), "rb", 0) as file:
            if fstat(file.fileno()).st_mode & _WRITABLE_BY_OTHERS:
                return None
            head = _head()
            start = file.read(len(head) + _SIZE_BYTES)
            if not start.startswith(head):
                return None
            root, sources = loads(file.read(int.from_bytes(start[len(head) :], "little")))
            if root != _ROOT:
                return None
            for _, _, path, size, changed in sources:
                found = stat(path)
                if found.st_mtime_ns != changed or found.st_size != size:
                    return None
            return sources, loads(file.read()) if code else ()
    except (OSError, EOFError, ValueError, TypeError, MemoryError):  # none, or a damaged one
        return None


def _run(name: str, is_package: bool, path: str, _size: int, _changed: int, code: "CodeType") -> None:
    """Make a module as the import statement does."""
    package, _, own = name.rpartition(".")
    if package:
        __import__(package)  # it may be in another part
    module = type(sys)(name)
    spec = ModuleSpec(name, SourceFileLoader(name, path), origin=path, is_package=is_package)
    spec.has_location = True
    values = module.__dict__
    values.update(__spec__=spec, __loader__=spec.loader, __file__=path, __package__=spec.parent)
    if is_package:
        spec.submodule_search_locations = values["__path__"] = [path.removesuffix("/__init__.py")]
    sys.modules[name] = module
    try:
        exec(code, values)  # noqa: S102 -- what importlib does with the same code from the same folder
    except BaseException:
        del sys.modules[name]
        raise
    if package:
        setattr(sys.modules[package], own, module)


def renew() -> None:
    """Write the bundles that this launch did not find, if Python may write its own files there. Never fails,
    and no signal ends it: the plugin's exit status is still to be passed on."""
    if not _wanted or sys.dont_write_bytecode:
        return
    from os import environ  # which `runner run --wrapped` has emptied
    from posix import W_OK, X_OK, access

    # Asked first: a user whose installation is root's would otherwise compile for nothing at each launch.
    folder = _path(_wanted[0]).rpartition("/")[0]
    if environ.get("RUNNER_CACHE", "").lower() == "off" or not access(folder, W_OK | X_OK):
        return
    try:
        from signal import SIG_IGN, SIGHUP, SIGINT, SIGTERM, signal

        for number in (SIGHUP, SIGINT, SIGTERM):
            signal(number, SIG_IGN)
        for part in _wanted:
            _write(part)
    except BaseException:  # noqa: BLE001 -- a module that cannot be compiled, no memory, a signal before
        pass


def _write(part: str) -> None:
    """Raises OSError and what compiling raises."""
    import os
    import time
    from importlib.abc import InspectLoader
    from importlib.util import find_spec
    from marshal import dumps

    from sandbox.speed.bundle_parts import PARTS

    sources, loaders = list[_Source](), list[InspectLoader]()
    for name in PARTS[part]:
        spec = find_spec(name)
        if spec is None or spec.origin is None or not isinstance(spec.loader, InspectLoader):
            return
        found = os.stat(spec.origin)
        if not spec.origin.startswith(f"{_ROOT}/") or time.time() - found.st_mtime < _SETTLED_SECONDS:
            return
        is_package = spec.submodule_search_locations is not None
        sources.append((name, is_package, spec.origin, found.st_size, found.st_mtime_ns))
        loaders.append(spec.loader)
    codes = tuple(
        _compile(loader.get_source(source[0]) or "", source[2])
        for source, loader in zip(sources, loaders, strict=True)
    )
    listed = dumps((_ROOT, tuple(sources)))
    temporary = f"{_path(part)}.{os.getpid()}"
    # Nobody may write it who cannot write the sources, whatever the umask is. Python does so with its files.
    mode = os.stat(__file__).st_mode & 0o644
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(_head() + len(listed).to_bytes(_SIZE_BYTES, "little") + listed + dumps(codes))
        os.rename(temporary, _path(part))
    except BaseException:
        os.unlink(temporary)
        raise


def _compile(source: str, path: str) -> "CodeType":
    """The code of a module without its docstrings, and without the import of `__future__`, which has done
    what it does when the code is compiled. Together they take a start 0.7 ms."""
    import __future__

    import ast

    tree = ast.parse(source, path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                node.body[0] = ast.copy_location(ast.Pass(), node.body[0])
            if isinstance(node, ast.Module):
                node.body = [each for each in node.body if getattr(each, "module", "") != "__future__"]
    code: CodeType = compile(tree, path, "exec", __future__.annotations.compiler_flag, dont_inherit=True)
    return code


def _path(part: str) -> str:
    return cache_from_source(f"{_ROOT}/sandbox/speed/{part}.py").removesuffix("pyc") + "bundle"


def _head() -> bytes:
    """Of each Python with other compiled code, another one."""
    return _FORMAT + MAGIC_NUMBER
