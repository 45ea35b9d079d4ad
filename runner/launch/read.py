"""Invocation -> Loaded: read the manifest, or make a plugin of the command line."""

from __future__ import annotations

import os

from runner.approvals.marks import mark_of_words, scope_mark, starts_below
from runner.contracts.registry import command_contract, find_contract
from runner.launch.failures import judge_diagnostics
from runner.launch.stages import Invocation, Loaded, Stopwatch
from runner.manifest.load import ManifestRead, contract_at
from runner.manifest.load import load as load_manifest
from runner.outcome import EXEC_NOT_FOUND, EXEC_REFUSED, Failure, Outcome
from runner.plugin import Entrypoint, Plugin, Template
from sandbox import look, surroundings
from sandbox.cache import fingerprint
from sandbox.document.diagnostic import quoted
from sandbox.spec import STATE_DIR_TOKEN, PathRequest
from sandbox.speed.typed import TYPE_CHECKING, Any, Mapping

if TYPE_CHECKING:
    from runner.contracts.contract import Contract
    from runner.launch.command import Command
    from sandbox.cell.contents import Contents


def load(invocation: Invocation, watch: Stopwatch) -> Loaded:
    """Read the manifest. Raises Failure."""
    read = read_invocation(invocation)
    if read.plugin is None:
        raise Failure(judge_diagnostics(read.diagnostics, "manifest"), EXEC_REFUSED)
    plugin, contract = read.plugin, find_contract(read.plugin.contract)
    loaded = Loaded(invocation, _with_present_parts(plugin), read.diagnostics)
    if plugin.entrypoint is None:
        message = f"the manifest of {plugin.id} names no command to run"
        hint = contract.no_command_hint
        outcome = Outcome("launch_failed", "manifest", message, "no_entrypoint", hint)
        raise Failure(outcome, EXEC_NOT_FOUND, loaded)
    fault = contract.launch_fault(plugin)
    if fault is None and plugin.spec.image is not None:
        from runner.install.images import image_fault

        fault = image_fault(plugin, look.environment(surroundings.variables()))
    if fault is not None:
        outcome = Outcome("launch_failed", "manifest", fault.message, fault.cause, fault.hint)
        raise Failure(outcome, EXEC_REFUSED, loaded)
    return loaded._replace(timings=watch.lap("manifest"))


def _with_present_parts(plugin: Plugin) -> Plugin:
    """The plugin without the parts of its folder that do not exist. The cached manifest does not know that.
    If none exists they all stay, because no parts means the whole folder."""
    if plugin.root is None or not plugin.root_parts:
        return plugin
    root = plugin.root
    present = tuple(part for part in plugin.root_parts if look.lexists(os.path.join(root, part)))
    return plugin._replace(root_parts=present or plugin.root_parts)


def read_invocation(
    invocation: Invocation, *, options: Mapping[str, str] | None = None, text: bytes | None = None
) -> ManifestRead:
    """Read the manifest or the command. A plugin that a launcher would fetch gets its stored program.
    `options`: contract options instead of the invocation's own. `text`: the manifest's bytes, if it was
    already read, instead of the invocation's own."""
    if invocation.command is not None:
        read = ManifestRead(plugin_of(invocation.command, contract_of(invocation) or ""))
    else:
        read = load_manifest(
            invocation.manifest,
            contract=invocation.contract,
            server=invocation.server,
            options=dict(invocation.options) if options is None else options,
            config=invocation.config,
            text=invocation.text if text is None else text,
        )
    plugin = read.plugin
    if plugin is None:
        return read
    environ = look.environment(surroundings.variables())
    if invocation.overrides.image is not None:
        plugin = plugin._replace(spec=plugin.spec._replace(image=invocation.overrides.image))
    if (hosts := find_contract(plugin.contract).configurations) is not None:
        plugin = hosts.installed(plugin, environ)
    if plugin.spec.image is not None and not plugin.spec.image.tree:
        from runner.install.images import with_image

        plugin = with_image(plugin, environ)
    return read._replace(plugin=plugin)


def contract_of(invocation: Invocation) -> str | None:
    """The name of the contract. None: the manifest has none, or has a fault that reading it reports."""
    if invocation.command is not None:
        return command_contract()
    return contract_at(invocation.manifest, invocation.contract, text=invocation.text)


def with_config(invocation: Invocation, config: Any) -> Invocation:
    """The invocation, with the plugin's configuration if its requests depend on it. Raises ValueError if that
    is not JSON."""
    from runner.protocol import wire

    name = None if config is None else contract_of(invocation)
    shapes = name is not None and "config" in find_contract(name).takes
    return invocation._replace(config=wire.encode(config).decode() if shapes else "")


def secret_contents(contract: Contract, secrets: Mapping[str, Any] | None) -> Contents | None:
    """The secrets that the cage delivers as files; None if the contract has none. Names with leading dashes
    are values of options and are left out. Raises ValueError if one is neither text nor bytes, or they are
    too large."""
    if not secrets or "secret_files" not in contract.takes:
        return None
    from sandbox.cell.contents import Contents

    found: dict[str, bytes] = {}
    for name, value in secrets.items():
        if name.startswith("--"):
            continue
        if not isinstance(value, str | bytes):
            raise ValueError(f"secrets: the value of {quoted(name)} has to be text or bytes")
        found[name] = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
    return Contents(found)


def plugin_of(command: Command, contract: str) -> Plugin:
    """The command as a plugin of a contract whose plugins are other people's programs."""
    program = command.argv[0]
    spec = command.spec
    if command.name:
        spec = spec._replace(paths=(*spec.paths, PathRequest(STATE_DIR_TOKEN, "write")))
    name = command.name or os.path.basename(program)
    # A command that names files of its folder is another command in another folder, such as a cloned project.
    # Of one without a name only a reserved uid depends on it, and no plan with such a uid is stored.
    with look.looked_at_again("" if command.name else "the files that a command names"):
        tied = command.named_directory or starts_below(command.argv, command.directory)
    folder = command.directory if tied else ""
    mark = mark_of_words(command.argv, spec.env, command.scope, folder)
    former: tuple[str, ...] = ()
    if command.other_program:  # the entry's own state is not for it, nor that of an earlier version
        mark = fingerprint(os.fsencode(mark), os.fsencode(command.other_program))[:32]
    elif command.file and not command.filled and folder in ("", look.realpath(command.entry_directory)):
        mark, former = scope_mark(command.scope), (mark,)
    return Plugin(
        id=name,
        version="",
        contract=contract,
        name=name,
        description="",
        manifest=command.file
        or (_place_of(program, command.directory) if spec.image is None else f"/{program}"),
        root=None,
        entrypoint=Entrypoint(program, command.argv[1:], command.directory, search_path=command.search_path),
        spec=spec,
        mark=mark,
        former_marks=former,
        approvable=bool(command.name),
        template=Template("", command.env_file_folder, command.env_file) if command.env_file else None,
        scope=command.scope,
        folder=folder,
    )


def _place_of(program: str, directory: str) -> str:
    """The path that takes the place of a manifest, for a command that came from no file."""
    if "/" in program:
        return os.path.normpath(os.path.join(directory, program))
    return look.realpath(_on_path(program) or os.path.join("/usr/bin", program))


def _on_path(name: str) -> str | None:
    """As shutil.which, which a launch would have to import: an empty entry of PATH is the current folder, an
    empty PATH has no entries, and without PATH the C library's default is used. One difference: a file counts
    as executable by its mode bits alone, as in the launch itself."""
    from sandbox.paths.executable import is_executable

    search_path = look.environment(surroundings.variables()).get("PATH")
    if search_path is None:
        search_path = os.confstr("CS_PATH")
    folders = search_path.split(":") if search_path else ()
    paths = (os.path.join(folder, name) for folder in folders)
    return next(filter(is_executable, paths), None)
