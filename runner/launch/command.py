"""A program that was given on the command line, without a manifest: `runner run -- COMMAND`."""

from __future__ import annotations

import os

from runner.plugin import Entrypoint, Plugin, Template
from sandbox import look
from sandbox.cache import fingerprint
from sandbox.spec import STATE_DIR_TOKEN, Approval, PathRequest, SandboxSpec
from sandbox.speed.typed import Mapping
from sandbox.speed.value import NamedTuple


class Command(NamedTuple):
    """The options of the command line are the caller's own words, so they count as approved. Of an entry that
    `runner wrap` wrote they are those of a configuration: see `said_by`."""

    argv: tuple[str, ...]  # at least the program
    directory: str  # absolute: the working directory
    name: str = ""  # with a name it has a state directory and approvals of its own
    file: str = ""  # the configuration it came from, if it came from one; absolute
    spec: SandboxSpec = SandboxSpec()  # what the options ask
    named_directory: bool = False  # by an option: the program starts there, or nothing starts
    scope: str = ""  # the project that it is for, in a configuration that has those of several
    env_file: str = ""  # a file of variables for the program, as its configuration names it
    env_file_folder: str = ""  # that it came with; empty: the one that the runner was started in
    search_path: str = ""  # the PATH by which the program is found; empty: the runner's
    # Of an entry that `runner wrap` wrote: the environment that the host gave the runner. Nothing of it
    # decides where the runner looks. Variables are passed on from it by name, and places that it names are
    # protected.
    host_environ: Mapping[str, str] | None = None
    outdated: bool = False  # an earlier version of `runner wrap` wrote the entry


def environ_of_host(command: Command | None, environ: Mapping[str, str]) -> Mapping[str, str]:
    """The variables that can be passed on to the plugin by name. `environ`: the runner's own."""
    return environ if command is None or command.host_environ is None else command.host_environ


def said_by(command: Command) -> Approval:
    """What a command line allows by itself. That a variable of the host is passed on by its name is only the
    wish of a configuration, where the command line came from one."""
    from sandbox.policy.approval import requested_approval

    asked = requested_approval(command.spec)
    return asked if command.host_environ is None else asked._replace(env=())


def plugin_of(command: Command, contract: str) -> Plugin:
    """The command as a plugin of a contract whose plugins are other people's programs."""
    from runner.approvals.record import arguments_digest  # who only passes a command on needs no approvals

    program = command.argv[0]
    spec = command.spec
    if command.name:
        spec = spec._replace(paths=(*spec.paths, PathRequest(STATE_DIR_TOKEN, "write")))
    name = command.name or os.path.basename(program)
    folder = command.directory if _depends_on_folder(command) else ""
    mark = arguments_digest(command.argv, spec.env)
    if command.scope or folder:
        mark = fingerprint(*(os.fsencode(part) for part in (mark, command.scope, folder)))[:32]
    return Plugin(
        id=name,
        version="",
        contract=contract,
        name=name,
        description="",
        manifest=command.file or _place_of(program, command.directory),
        root=None,
        entrypoint=Entrypoint(program, command.argv[1:], command.directory, search_path=command.search_path),
        spec=spec,
        mark=mark,
        approvable=bool(command.name),
        template=Template("", command.env_file_folder, command.env_file) if command.env_file else None,
        scope=command.scope,
        folder=folder,
    )


def _depends_on_folder(command: Command) -> bool:
    """A project that was cloned may have a program of the same name: it is another one. A command that names
    nothing of its folder is the same one wherever a person stands."""
    from runner.approvals.record import starts_below

    return command.named_directory or starts_below(command.argv, command.directory)


def _place_of(program: str, directory: str) -> str:
    """What stands for the manifest of a command that came from no file: when it is gone, so is the plugin."""
    if "/" in program:
        return os.path.normpath(os.path.join(directory, program))
    return look.realpath(_on_path(program) or os.path.join("/usr/bin", program))


def _on_path(name: str) -> str | None:
    """As shutil.which finds it, which a launch would have to import: an empty entry of PATH is the current
    folder, an empty PATH has no entries, and without PATH the C library's takes its place. One difference: a
    file counts as executable by its mode bits alone, as in the launch itself."""
    from sandbox.paths.executable import is_executable

    search_path = look.environment(os.environ).get("PATH")
    if search_path is None:
        search_path = os.confstr("CS_PATH")
    folders = search_path.split(":") if search_path else ()
    paths = (os.path.join(folder, name) for folder in folders)
    return next(filter(is_executable, paths), None)
