"""A plugin of any contract, as its manifest describes it."""

from __future__ import annotations

from sandbox.spec import KeyPath, NetworkMode, Project, SandboxSpec
from sandbox.speed.typed import TYPE_CHECKING, Any
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Entrypoint(NamedTuple):
    """How the plugin's own program is started, before any cage is put around it."""

    command: str  # with a slash: relative to `directory`; without: looked up on PATH
    args: tuple[str, ...] = ()
    directory: str = "/"  # absolute: the working directory, and the folder of a relative command
    # The contract promises exactly the variables it lists: the runner adds no PATH, HOME or LANG.
    bare_environment: bool = False
    search_path: str = ""  # where `command` is looked up; empty: on the runner's PATH
    # If a stored program is started in place of a launcher such as npx: the launcher's own words, and how
    # many of `args` take their place.
    launcher: tuple[str, ...] = ()
    stored_args: int = 0

    @property
    def words(self) -> tuple[str, ...]:
        """The command line as it was written."""
        if self.launcher:
            return *self.launcher, *self.args[self.stored_args :]
        return self.command, *self.args


class Template(NamedTuple):
    """Placeholders in the manifest that are filled in at the launch, by rules of its contract.

    The parsed manifest is cached, so the values cannot be part of it."""

    rules: str  # the name of the rules, in its contract
    folder: str = ""  # the project folder they refer to; empty: the working directory of the runner
    env_file: str = ""  # a file of variables
    env_file_where: KeyPath = ()
    # The options of `runner run`, if the manifest starts the plugin through it.
    outer: tuple[str, ...] = ()
    files: tuple[str, ...] = ()  # files whose text becomes part of the command line
    # What decides which code the command line runs, besides the manifest: "" (nothing), "variables" and the
    # like of the host, or "folder", the working directory of the runner.
    decided_by: str = ""


class Plugin(NamedTuple):
    id: str
    version: str
    contract: str  # the name of a folder in runner/contracts/
    name: str
    description: str
    manifest: str  # absolute path of the file this was read from
    # The plugin's own folder, bound read-only. None when the manifest is not part of the plugin (a
    # configuration lists other people's programs): then the cage shows only the program's own files.
    root: str | None
    entrypoint: Entrypoint | None  # None: the manifest names nothing to start
    spec: SandboxSpec
    exports: tuple[tuple[str, tuple[str, ...]], ...] = ()  # kind ("tools", "hooks", …) -> names
    capabilities: tuple[str, ...] = ()
    timeouts: tuple[tuple[str, float], ...] = ()  # phase -> seconds
    project: Project | None = None  # the folder it works on, where that is not its own
    # The contract's settings for a supervisor, such as restarts: name -> seconds, a number, or a word. A
    # session uses only those about itself.
    lifecycle: tuple[tuple[str, float | str], ...] = ()
    # Where `root` is in the cage; empty: under its own name. With `root_parts`, only these files and folders
    # of it are shown, by their names in it.
    root_inside: str = ""
    root_parts: tuple[str, ...] = ()
    # Tells apart plugins with the same id in the same file. Part of the name of the state directory.
    mark: str = ""
    former_marks: tuple[str, ...] = ()  # marks of the same plugin in earlier versions
    # Whether an approval can be stored for it: that needs a name to store it under.
    approvable: bool = True
    template: Template | None = None  # None: nothing is filled in
    # An approval is valid only for this project, if a file has plugins of several projects; and only in this
    # folder, if the code that runs depends on the working directory.
    scope: str = ""
    folder: str = ""
    # A folder that the cage shows as the plugin's own, although its manifest is a configuration (`root` is
    # None): the file asks for it, and lies in it with the program.
    shown_folder: str = ""
    # What else its manifest says, for its contract alone: JSON values, in which a list may be a tuple.
    details: Mapping[str, Any] = {}


class Allowance(NamedTuple):
    """What services of the host may do on behalf of a plugin, by the policy."""

    state_dir: str | None = None  # the plugin's own directory, on the host
    readable: tuple[str, ...] = ()  # paths of the host that it was granted
    hosts: tuple[str, ...] = ()  # patterns of the hosts that the policy allows: "*.example.com:443"
    writable: tuple[str, ...] = ()  # paths of the host that it can change, the state directory among them
    denied: tuple[str, ...] = ()  # paths that the policy denies to every plugin
    network: NetworkMode = "none"  # of its cage, as granted


class LaunchFault(NamedTuple):
    """Why a plugin is not launched, although nothing is wrong with its manifest."""

    cause: str  # stable id
    message: str
    hint: str
