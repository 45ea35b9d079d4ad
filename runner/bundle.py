"""The modules of a launch, compiled, in one or two files: to find and read sixty takes longer than to run
what is in them.

Python keeps the compiled code of a module in a folder `__pycache__` beside it. A bundle is in that folder
too, and is believed for the same reason: who can write there can also change the sources. It is used only if
each source is as it was, by time and size, in the place where it was. Otherwise the modules are imported as
usual, and the launch writes new bundles when it has ended.
"""

import sys  # and no `from __future__`: importing that module costs every start more than this whole file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType

# Each part is a file of its own. Each module stands behind those that it imports.
PARTS: "dict[str, tuple[str, ...]]" = {
    # What a launch from a kept plan loads: all that carries out a plan.
    "launch": (
        "runner",
        "runner.late_site",
        "sandbox",
        "sandbox.typed",
        "runner.cli",
        "runner.cli.shared",
        "runner.cli.shared.plain",
        "runner.launch",
        "runner.launch.stored",
        "sandbox.value",
        "sandbox.cache",
        "sandbox.facts",
        "runner.launch.stored.entry",
        "runner.outcome",
        "sandbox.given",
        "sandbox.limits",
        "sandbox.limits.assigned",
        "sandbox.scopes",
        "runner.launch.stages",
        "sandbox.identity",
        "sandbox.identity.owner",
        "sandbox.files",
        "sandbox.limits.site",
        "sandbox.limits.cgroup_settings",
        "sandbox.signals",
        "sandbox.spawn",
        "sandbox.spawn.order",
        "sandbox.limits.cgroup",
        "sandbox.plan",
        "sandbox.plan.layers",
        "sandbox.plan.plan",
        "runner.launch.acquire",
        "sandbox.limits.meter",
        "sandbox.streams",
        "sandbox.streams.descriptor_flags",
        "sandbox.streams.handover",
        "runner.launch.stdio",
        "sandbox.cell",
        "sandbox.limits.rlimits",
        "sandbox.spawn.machine_code",
        "sandbox.spawn.launcher",
        "sandbox.cell.cell",
        "runner.launch.wait",
        "sandbox.plan.bwrap",
        "sandbox.spawn.reaper",
        "sandbox.spawn.libc",
        "sandbox.spawn.init",
        "sandbox.spawn.spawner",
        "sandbox.cell.launch",
        "sandbox.limits.cgroup_meters",
        "runner.launch.start",
        "runner.launch.carry_out",
        "runner.cli.shared.launching",
        "sandbox.codec",
        "runner.launch.stored.run",
        "runner.cli.shared.kept",
        "sandbox.paths",
        "sandbox.paths.file_identity",
        "sandbox.cell.reopened",
        "sandbox.identity.uid_range",
        "sandbox.identity.leases",
        "sandbox.limits.socket_meter",
        "sandbox.limits.socket_tables",
    ),
    # What `runner exec` loads besides if no plan holds, for a manifest and a policy that it knows.
    "decide": (
        "runner.contracts",
        "sandbox.spec",
        "runner.plugin",
        "runner.contracts.contract",
        "sandbox.look",
        "runner.contracts.registry",
        "sandbox.document",
        "sandbox.document.diagnostic",
        "sandbox.policy",
        "sandbox.network",
        "sandbox.network.egress",
        "sandbox.paths.mounts",
        "sandbox.paths.denied_paths",
        "sandbox.paths.guarded",
        "sandbox.paths.denylist",
        "sandbox.paths.walk",
        "sandbox.paths.source",
        "sandbox.policy.policy",
        "runner.cli.shared.options",
        "runner.cli.shared.report_file",
        "runner.approvals",
        "sandbox.policy.approval",
        "runner.approvals.record",
        "runner.approvals.store",
        "sandbox.document.read",
        "sandbox.paths.executable",
        "sandbox.policy.load",
        "runner.launch.approve",
        "runner.launch.command",
        "runner.manifest",
        "runner.manifest.cache",
        "runner.manifest.load",
        "runner.launch.read",
        "runner.launch.verdict",
        "sandbox.identity.removal",
        "sandbox.identity.host_side",
        "sandbox.identity.reservations",
        "sandbox.identity.uids",
        "sandbox.identity.state",
        "sandbox.paths.homes",
        "sandbox.policy.grant",
        "runner.launch.prepare",
        "sandbox.limits.cgroup_survey",
        "sandbox.limits.assign",
        "sandbox.seccomp",
        "sandbox.seccomp.filter",
        "sandbox.plan.available_layers",
        "sandbox.paths.packages",
        "sandbox.paths.shims",
        "sandbox.paths.installation",
        "sandbox.paths.program",
        "sandbox.paths.access",
        "sandbox.plan.mentions",
        "sandbox.plan.egress",
        "sandbox.plan.operations",
        "sandbox.plan.relocation",
        "sandbox.plan.places",
        "sandbox.plan.compile",
        "sandbox.plan.find_bwrap",
        "runner.launch.plan",
        "runner.launch.run",
        "runner.cli.exec",
        "runner.launch.stored.code",
        "runner.launch.stored.unit",
        "runner.launch.stored.keep",
    ),
}

_FORMAT = b"runner bundle 1\n"
# A source that changed so recently could change again without another time.
_SETTLED_SECONDS = 2.0
# The folder that holds runner/ and sandbox/.
_ROOT = __file__.removesuffix("/runner/bundle.py")

_Entry = tuple[str, bool, str, int, int, "CodeType"]  # name, is it a package, its file, size, time, code

_wanted: "list[str]" = []  # parts of which there is no bundle that fits


def load(part: str) -> None:
    """Import the modules of a part from its bundle. If none fits, they are imported as usual later."""
    # Isolated: otherwise variables may have told Python where to find modules. And somebody who asks for the
    # times of the imports wants to see each.
    if sys.flags.isolated and "importtime" not in sys._xoptions:
        import gc

        gc.disable()  # a launch makes little garbage, and while modules are made nothing is garbage
        entries = _read(part)
        if entries is None:
            _wanted.append(part)
        for entry in entries or ():
            if entry[0] not in sys.modules:
                try:
                    _run(*entry)
                except Exception:  # noqa: BLE001 -- who needs the module imports it, and sees why that fails
                    return


def _read(part: str) -> "tuple[_Entry, ...] | None":
    from marshal import loads
    from posix import stat

    try:
        with open(_path(part), "rb", 0) as file:
            raw = file.read()
        head = _head()
        if not raw.startswith(head):
            return None
        root, entries = loads(memoryview(raw)[len(head) :])
        if root != _ROOT:
            return None
        for _, _, path, size, changed, _ in entries:
            found = stat(path)
            if found.st_mtime_ns != changed or found.st_size != size:
                return None
    except (OSError, EOFError, ValueError, TypeError):  # none, or one that was not written to its end
        return None
    read: tuple[_Entry, ...] = entries
    return read


def _run(name: str, is_package: bool, path: str, _size: int, _changed: int, code: "CodeType") -> None:
    """Make a module as the import statement does."""
    from _frozen_importlib import ModuleSpec
    from _frozen_importlib_external import SourceFileLoader

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
    """Write the bundles that this launch did not find, if Python may write its own files there."""
    if not sys.dont_write_bytecode:
        for part in _wanted:
            _write(part)


def _write(part: str) -> None:
    import os
    import time
    from importlib.util import find_spec
    from marshal import dumps

    entries = list[_Entry]()
    temporary = f"{_path(part)}.{os.getpid()}"
    try:
        if not os.access(os.path.dirname(temporary), os.W_OK):
            return
        for name in PARTS[part]:
            spec = find_spec(name)
            if spec is None or spec.origin is None or not spec.origin.startswith(f"{_ROOT}/"):
                return
            found = os.stat(spec.origin)
            code = spec.loader.get_code(name)  # type: ignore[union-attr]  # that of a file, which has it
            if time.time() - found.st_mtime < _SETTLED_SECONDS:
                return
            is_package = spec.submodule_search_locations is not None
            entries.append((name, is_package, spec.origin, found.st_size, found.st_mtime_ns, code))
        try:
            with open(temporary, "xb") as file:
                file.write(_head() + dumps((_ROOT, tuple(entries))))
            os.rename(temporary, _path(part))
        except OSError:
            os.unlink(temporary)
    except (OSError, ImportError):
        pass


def _path(part: str) -> str:
    from _frozen_importlib_external import cache_from_source

    return cache_from_source(f"{_ROOT}/runner/{part}.py").removesuffix("pyc") + "bundle"


def _head() -> bytes:
    """Of each Python with other compiled code, another one."""
    from _frozen_importlib_external import MAGIC_NUMBER

    return _FORMAT + MAGIC_NUMBER
