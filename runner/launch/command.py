"""Command: a program from the command line, without a manifest: `runner run -- COMMAND`."""

from __future__ import annotations

from runner.plugin import Plugin
from sandbox.spec import Approval, SandboxSpec
from sandbox.speed.typed import Mapping
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
    dropped: tuple[str, ...] = ()  # EntryFound.dropped


def environ_of_host(command: Command | None, environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment whose variables can be passed on to the plugin. `environ`: the runner's own."""
    return environ if command is None or command.host_environ is None else command.host_environ


def wrapped_entry(command: Command | None) -> str:
    """The entry that `runner wrap` wrote and a host starts, for a sentence; '': it is none."""
    if command is None or command.host_environ is None:
        return ""
    return f"the args of {command.name} in {command.file}"


def environ_of_places(plugin: Plugin, environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment that says where approvals and state of the plugin are. For an entry that `runner wrap`
    wrote, no variable of the caller's says that: its host's runner (`--wrapped`) does not see them."""
    if plugin.template is None or not plugin.template.outer:
        return environ
    from sandbox.paths.homes import own_home

    return {"HOME": own_home() or environ.get("HOME", "")}


def command_approval(command: Command) -> Approval:
    """The approval that a command line implies. Not for variables of the host, and the image of `x-sandbox`,
    if the command line came from a configuration: a person has to approve those."""
    from sandbox.policy.approval import requested_approval

    asked = requested_approval(command.spec)
    return asked if command.host_environ is None else asked._replace(env=(), hide=(), ssh=(), images=())
