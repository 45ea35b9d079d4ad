"""Configurations of hosts: manifests with the command lines of several plugins. `runner wrap` changes their
entries, so that the host starts the runner."""

from __future__ import annotations

from sandbox.speed.typed import TYPE_CHECKING, Callable, Protocol
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.plugin import Plugin
    from sandbox.document.diagnostic import Diagnostic
    from sandbox.document.read import Document, Format
    from sandbox.paths.guarded import GuardedName
    from sandbox.spec import KeyPath

# Prefix of the variables in an entry that `runner wrap` wrote: they are for the plugin, not for the runner.
PLUGIN_PREFIX = "PLUGIN_ENV_"
# How `runner wrap` writes entries. Those of its first version have no format in their record.
WRAP_FORMAT = "2"


class WrappedCommand(NamedTuple):
    """The command that a host starts in place of a plugin's own program, with placeholders filled in."""

    options: tuple[str, ...]  # of `runner run`
    argv: tuple[str, ...]
    directory: str = ""  # where the host starts it; empty: that is not known from the manifest
    env: tuple[tuple[str, str], ...] = ()  # the variables that the host sets


class WrappedEntry(NamedTuple):
    """What a command line claims about the configuration entry it came from. Untrusted."""

    manifest: str
    id: str
    scope: str
    options: tuple[str, ...]  # of `runner run`, after the host filled in placeholders
    argv: tuple[str, ...]  # the plugin's
    outdated: bool = False  # an earlier version wrote it: its variables have their own names


class EntryFound(NamedTuple):
    """The entry as it is in its configuration file."""

    folder: str  # the project that the configuration came with; empty: none
    # Variables of the host that the plugin gets without an approval: those that the entry sets itself, and in
    # a user's own configuration all that it names.
    variables: frozenset[str] | None  # None: all
    # Whether the command line, or a variable that decides which code runs, is another than the file says: its
    # host, or somebody else, has filled in placeholders.
    filled: bool = False
    directory: str = ""  # the working directory by the file alone
    # The program, if it is another one than the host's own PATH leads to: whoever started the runner has set
    # another PATH for it, and the entry does not.
    program: str = ""
    # Names that were added to the entry since it was wrapped, and reach no plugin; "envFile" for a file.
    dropped: tuple[str, ...] = ()
    image: str = ""  # that it asks to be started in, in full; a person has to allow it


class HostPlaces(NamedTuple):
    """Files and folders from which hosts run code. No plugin of any contract may write to them."""

    home: tuple[str, ...] = ()  # files and folders, below a home
    system: tuple[str, ...] = ()  # absolute
    variables: tuple[str, ...] = ()  # of the environment, whose values are further places
    project: tuple[GuardedName, ...] = ()  # at the top of a project; read-only in a folder that is writable
    tokens: tuple[str, ...] = ()  # files with tokens, below a home. No plugin may read them either


class HostFile(NamedTuple):
    """How a host's configuration is read."""

    format: Format
    # Limits on bytes and values, if they are higher than for a manifest: some hosts store other data in a
    # user's own file too.
    limits: tuple[int, int] | None = None


class HostConfigurations(Protocol):
    """A contract whose manifests are the configuration files of the hosts that start its plugins.

    Such a file may list several plugins (--server chooses), and may have any format. Some are known by the
    folder they are in, because their names are too common. The operator wrote the command lines, not the
    plugin's author: so the cage shows the files that a command line names without asking the policy. A
    command without a manifest is taken for a plugin of this contract.
    """

    def file_at(self, path: str) -> HostFile | None:
        """How the configuration at this absolute path is read. None: the path is not that of one."""
        ...

    def servers(self, document: Document) -> tuple[str, ...]:
        """The names that --server can choose from."""
        ...

    def program_faults(self, document: Document, server: str | None) -> tuple[Diagnostic, ...]:
        """What is wrong with the program of a server whose entry has other faults, so that there is no
        plugin to check."""
        ...

    def remarks(self, document: Document) -> tuple[Diagnostic, ...]:
        """Warnings about the whole file, which belong to none of its `servers`."""
        ...

    def origin(self, document: Document) -> str:
        """The name of the host that the file belongs to, or ''."""
        ...

    def is_users_own(self, path: str, environ: Mapping[str, str]) -> bool:
        """Whether a file at this path is the calling user's own and cannot have come with a project."""
        ...

    def fill(
        self, plugin: Plugin, variable: Callable[[str], str | None], read_file: Callable[[str, KeyPath], str]
    ) -> tuple[Plugin, tuple[str, ...]]:
        """Fill in the placeholders of a plugin. Returns the plugin, and the values only its host can ask a
        person for.

        `variable`: a variable of the host; None if there is none, or it is withheld. `read_file`: the text of
        a file and where the manifest names it. It refuses the launch if the plugin may not have the file.
        """
        ...

    def wrapped(self, plugin: Plugin, environ: Mapping[str, str]) -> WrappedCommand | None:
        """The command behind `runner run`, if the program of this plugin is the runner itself, put there so
        that a host starts the command in a cage."""
        ...

    def find_entry(self, wrapped: WrappedEntry, environ: Mapping[str, str]) -> EntryFound:
        """The entry that a wrapped command line says it came from. `environ`: as the host set it. Raises
        ValueError if the options are none of an entry's, or the file has no entry with this command line and
        these variables."""
        ...

    def gateway_remark(self, path: str) -> str:
        """What people should know about the entry that starts a gateway with this file, or ''. Never
        raises."""
        ...

    def installed(self, plugin: Plugin, environ: Mapping[str, str]) -> Plugin:
        """The plugin with the stored program of its packages, if a launcher would fetch them and `runner
        install` has done so."""
        ...

    def keeps_nothing(self, plugin: Plugin) -> bool:
        """Whether the plugin keeps nothing for one client, so that several may use one process of it."""
        ...

    def places(self) -> HostPlaces:
        """Called for every launch with a writable folder, for plugins of all contracts."""
        ...
