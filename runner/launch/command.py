"""Command: a program from the command line, without a manifest: `runner run -- COMMAND`."""

from __future__ import annotations

import os

from runner.plugin import Entrypoint, Plugin, Template
from sandbox import look
from sandbox.cache import fingerprint
from sandbox.spec import STATE_DIR_TOKEN, Approval, EnvRequest, PathRequest, SandboxSpec
from sandbox.speed.typed import Mapping, Sequence
from sandbox.speed.value import NamedTuple


class Command(NamedTuple):
    """A program with its options. The caller typed the options, so they count as approved. In an entry that
    `runner wrap` wrote they come from a configuration: see `command_approval`."""

    argv: tuple[str, ...]  # at least the program
    directory: str  # absolute: the working directory
    name: str = ""  # with a name it has a state directory and approvals of its own
    file: str = ""  # the configuration it came from, if it came from one; absolute
    spec: SandboxSpec = SandboxSpec()  # what the options ask for
    named_directory: bool = False  # an option names it: if it is not shown, the launch is refused
    scope: str = ""  # its project, in a configuration for several projects
    env_file: str = ""  # a file of variables for the program, as its configuration names it
    env_file_folder: str = ""  # base of a relative env_file; '': the runner's working directory
    search_path: str = ""  # PATH for finding the program; '': the runner's
    # Only for an entry that `runner wrap` wrote: the environment that the host gave the runner. It has no
    # effect on the runner itself. Variables are passed on from it by name, and paths that it names are
    # protected.
    host_environ: Mapping[str, str] | None = None
    outdated: bool = False  # an earlier version of `runner wrap` wrote the entry
    # Of an entry: whether placeholders of its command line were filled in, and the working directory by its
    # file alone.
    filled: bool = False
    entry_directory: str = ""
    other_program: str = ""  # EntryFound.program


def environ_of_host(command: Command | None, environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment whose variables can be passed on to the plugin. `environ`: the runner's own."""
    return environ if command is None or command.host_environ is None else command.host_environ


def environ_of_places(plugin: Plugin, environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment that says where approvals and state of the plugin are. For an entry that `runner wrap`
    wrote, no variable of the caller's says that: its host's runner (`--wrapped`) does not see them."""
    if plugin.template is None or not plugin.template.outer:
        return environ
    from sandbox.paths.homes import own_home

    return {"HOME": own_home() or environ.get("HOME", "")}


def command_approval(command: Command) -> Approval:
    """The approval that a command line implies. Not for variables of the host, if the command line came from
    a configuration: a person has to approve those."""
    from sandbox.policy.approval import requested_approval

    asked = requested_approval(command.spec)
    return asked if command.host_environ is None else asked._replace(env=())


def plugin_of(command: Command, contract: str) -> Plugin:
    """The command as a plugin of a contract whose plugins are other people's programs."""
    program = command.argv[0]
    spec = command.spec
    if command.name:
        spec = spec._replace(paths=(*spec.paths, PathRequest(STATE_DIR_TOKEN, "write")))
    name = command.name or os.path.basename(program)
    folder = command.directory if _depends_on_folder(command) else ""
    mark = _mark_of_words(command.argv, spec.env, command.scope, folder)
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
        manifest=command.file or _place_of(program, command.directory),
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


def scope_mark(scope: str) -> str:
    """The mark of an entry whose file alone says what runs: its name, its file and its project identify
    it."""
    return fingerprint(os.fsencode(scope))[:32] if scope else ""


def mark_entry(plugin: Plugin) -> Plugin:
    """An entry of a configuration, whose placeholders are filled in, with the marks that it has if its host
    starts it through the runner."""
    from runner.approvals.record import starts_below

    entrypoint, template = plugin.entrypoint, plugin.template
    assert entrypoint is not None  # `load` has refused it
    words = entrypoint.words
    folder = look.realpath(entrypoint.directory) if starts_below(words, entrypoint.directory) else ""
    mark = _mark_of_words(words, plugin.spec.env, plugin.scope, folder)
    if template is None or not template.decided_by:
        return plugin._replace(former_marks=(mark,))
    # Its earlier state is not for the code of whatever project the caller is in.
    former = () if template.decided_by == "folder" else (plugin.mark,)
    return plugin._replace(mark=mark, former_marks=former)


def _mark_of_words(words: Sequence[str], env: Sequence[EnvRequest], scope: str, folder: str) -> str:
    """The mark of a command line."""
    from runner.approvals.record import arguments_digest  # here: not all users of a Command need approvals

    mark = arguments_digest(words, env)
    if scope or folder:
        mark = fingerprint(*(os.fsencode(part) for part in (mark, scope, folder)))[:32]
    return mark


def _depends_on_folder(command: Command) -> bool:
    """Whether the command names files of its folder. In another folder, such as a cloned project, it is then
    another command. Otherwise it is the same in every folder."""
    from runner.approvals.record import starts_below

    return command.named_directory or starts_below(command.argv, command.directory)


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

    search_path = look.environment(os.environ).get("PATH")
    if search_path is None:
        search_path = os.confstr("CS_PATH")
    folders = search_path.split(":") if search_path else ()
    paths = (os.path.join(folder, name) for folder in folders)
    return next(filter(is_executable, paths), None)
