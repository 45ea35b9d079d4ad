"""What a plugin is, whatever contract it was written for."""

from __future__ import annotations

from sandbox.spec import KeyPath, Project, SandboxSpec
from sandbox.speed.value import NamedTuple

# How the names of a wrapped entry's variables begin: they are the plugin's, and mean nothing to the runner.
PLUGIN_PREFIX = "PLUGIN_ENV_"
# How `runner wrap` writes entries. Those of its first version have no format in their record.
WRAP_FORMAT = "2"


class Entrypoint(NamedTuple):
    """How the plugin's own program is started, before any cage is put around it."""

    command: str  # with a slash: relative to `directory`; without: looked up on PATH
    args: tuple[str, ...] = ()
    directory: str = "/"  # absolute: the working directory, and the folder of a relative command
    # The contract promises exactly the variables it lists: the runner adds no PATH, HOME or LANG.
    bare_environment: bool = False
    search_path: str = ""  # where `command` is looked up; empty: on the runner's PATH


class Template(NamedTuple):
    """Words of the manifest that are filled in at the launch: its contract knows the rules.

    The manifest's text is cached, and the values are those of the moment."""

    rules: str  # whose
    folder: str = ""  # the project that they are about; empty: the one that the runner was started in
    env_file: str = ""  # a file of variables
    env_file_where: KeyPath = ()
    # Options of `runner run`, where the manifest starts the plugin with it; its own words are those inside.
    outer: tuple[str, ...] = ()
    files: tuple[str, ...] = ()  # whose text becomes a part of the command line


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
    # What its contract says about starting it again and looking after it: word -> seconds, a number, or a
    # word. For a supervisor; one session heeds only what concerns itself.
    lifecycle: tuple[tuple[str, float | str], ...] = ()
    # Where `root` is in the cage; empty: under its own name. With `root_parts`, only these files and folders
    # of it are shown, by their names in it.
    root_inside: str = ""
    root_parts: tuple[str, ...] = ()
    # Tells apart plugins of one id and one file; the name of its state directory depends on it too.
    mark: str = ""
    # Whether a person can approve something for it once and for all: it has a name to be known by.
    approvable: bool = True
    template: Template | None = None  # None: its words mean what they say
    # A yes holds only for this project, where a file has the plugins of several; and only in this folder,
    # where what runs depends on it.
    scope: str = ""
    folder: str = ""


class Allowance(NamedTuple):
    """What the policy gives a plugin beside its cage: for services of the host that act on its behalf."""

    state_dir: str | None = None  # the plugin's own directory, on the host
    readable: tuple[str, ...] = ()  # paths of the host that it was granted
    hosts: tuple[str, ...] = ()  # patterns of the hosts that the policy allows: "*.example.com:443"
    writable: tuple[str, ...] = ()  # paths of the host that it can change, the state directory among them
    denied: tuple[str, ...] = ()  # paths that the policy denies to every plugin


class Switches(NamedTuple):
    """What the operator says through a contract's own environment variables."""

    sandbox_required_by: str = ""  # the variable that refuses manifests without a sandbox, if it is set
    # The variable that asks for the host's network, if it is set. The policy says whether that counts.
    host_network_by: str = ""
