"""What the rest of the runner knows about a plugin contract, and all it knows.

Each folder of runner/contracts/ exposes one `CONTRACT` in its `__init__.py`. That file must be cheap to
import, because every launch imports it. A method imports the heavy modules (pydantic models, the dialect)
when it is called.

    class ToyContract(Contract):
        name = "toy"
        ...

    CONTRACT = ToyContract()
"""

from __future__ import annotations

import os

from runner.plugin import Switches
from sandbox.speed.typed import TYPE_CHECKING, Any, Callable, Protocol
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from runner.plugin import Allowance, Plugin
    from runner.protocol.dialect import Call, CallEnd, Dialect, Setting
    from runner.protocol.host_services import Delegation, DelegationRequest, HostMethods, Services
    from runner.protocol.inspector import Inspector
    from sandbox.document.diagnostic import Diagnostic
    from sandbox.document.read import Document, Format
    from sandbox.paths.guarded import GuardedName
    from sandbox.spec import KeyPath


class Listing(NamedTuple):
    """Something a plugin can be asked to list while it runs."""

    what: str  # the name of the list: "tools"
    kind: str = ""  # the kind of a call that takes an entry: "tool". Empty: no call does
    key: str = "name"  # the key of an entry that such a call takes
    offered_as: str = ""  # the key of Identity.details that says whether the plugin has the list
    complete: bool = True  # False: a call may also take what the list does not name


class ContractOption(NamedTuple):
    """An option for plugins of this contract only. Its value reaches `read` and the dialect."""

    flag: str  # "--binding"
    metavar: str
    help: str
    verbs: tuple[str, ...] = ("exec", "call", "tools", "explain", "check")
    names_file: bool = False  # the shell completes file names
    # The value is the name of a file. The file is read once, before the launch: `options` has its text, and
    # its name under the option's name with "_file" behind it.
    reads_file: bool = False
    secret: bool = False  # its value is a secret: it reaches `prepare`, and nothing that is kept or shown

    @property
    def name(self) -> str:
        """The key of its value in `options`."""
        return self.flag.lstrip("-").replace("-", "_")


class ContractVerb(NamedTuple):
    """A verb of the command line that this contract brings along."""

    name: str
    module: str  # "runner.contracts.NAME.VERB", a `Verb`
    help: str


class Verb(Protocol):
    """The module of a verb. It may also have `advice(message)`, which explains a usage error."""

    NAME: str
    HELP: str
    EXAMPLE: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, args: argparse.Namespace) -> int: ...


class ExampleCall(NamedTuple):
    """A call of the plugin in the contract's example/ that succeeds. With the input {} it fails."""

    name: str = "greet"  # may contain the id of the example's plugin, which `runner new` replaces
    input: str = '{"name": "world"}'  # JSON


class Prepared(NamedTuple):
    """A call, and what its launch needs to know of it."""

    call: Call  # completed: what the dialect sends
    options: Mapping[str, str]  # of the contract, for `read` and the dialect
    contents: Mapping[str, bytes]  # of the memory files, by their path in the cage
    secrets: Mapping[str, str]  # all that must not be shown: also what the call itself carries
    delegation: DelegationRequest | None = None  # credentials that the host's own service has to make


class LaunchFault(NamedTuple):
    """Why a plugin is not launched, although nothing is wrong with its manifest."""

    cause: str  # stable id
    message: str
    hint: str


class WrappedCommand(NamedTuple):
    """What a host starts in the place of a plugin's own program, with all filled in."""

    options: tuple[str, ...]  # of `runner run`
    argv: tuple[str, ...]
    directory: str = ""  # where the host starts it; empty: that is not known from the manifest
    env: tuple[tuple[str, str], ...] = ()  # the variables that the host sets


class WrappedEntry(NamedTuple):
    """What a command line says about the entry that it came from. Whoever wrote it may have said anything."""

    manifest: str
    id: str
    scope: str
    options: tuple[str, ...]  # of `runner run`, as the host filled them in
    argv: tuple[str, ...]  # the plugin's
    outdated: bool = False  # an earlier version wrote it: its variables have their own names


class EntryFound(NamedTuple):
    """The entry, as its configuration has it."""

    folder: str  # the project that the configuration came with; empty: none
    # The variables of the host that it gives the plugin without anybody's yes: those that the entry itself
    # has a value for, and in a user's own configuration all that it names.
    variables: frozenset[str] | None  # None: all


class HostPlaces(NamedTuple):
    """Where the hosts of a contract's plugins keep what they run. No plugin of any contract may write it."""

    home: tuple[str, ...] = ()  # files and folders, below a home
    system: tuple[str, ...] = ()  # absolute
    variables: tuple[str, ...] = ()  # of the environment, whose values are further places
    project: tuple[GuardedName, ...] = ()  # at the top of a project; read-only in a folder that is writable


class CommandOutput(NamedTuple):
    stdout: bytes
    stderr: bytes
    status: int


class Contract(Protocol):
    about: str  # one line for `runner contracts`: whose plugins they are, and how they talk

    # --- its manifests ------------------------------------------------------------------------------------

    name: str  # the name of its folder, and what --contract takes
    format: Format
    formats: tuple[Format, ...] = ()  # further ones that its manifests may have
    file_names: tuple[str, ...]  # in order of preference
    sign: str  # how a manifest with another file name is recognised, for messages
    in_subdirectory: bool = False  # look into the only subdirectory of a folder: an unpacked archive
    # Whether plugins lie side by side in a root, each in a folder of its own. `check` and `tools` take the
    # root, and skip a plugin whose manifest has an error.
    plugin_roots: bool = False
    several_plugins: bool = False  # one manifest may describe several plugins, --server chooses
    no_command_hint: str  # what to do about a manifest without a command to start

    # Whether the operator wrote the command line, not the plugin's author. Only then does the cage show the
    # files that the command line names without asking the policy.
    operators_own_command: bool = False
    takes_commands: bool = False  # whether a command without a manifest is taken for one of its plugins

    # Whether some of its manifests are known by the folder they are in, because their names are too common.
    known_by_place: bool = False

    def format_at(self, path: str) -> Format | None:
        """The format of a manifest at this absolute path. None: its path does not say that it is one."""
        return self.format if os.path.basename(path) in self.file_names else None

    def limits_at(self, path: str) -> tuple[int, int] | None:
        """How many bytes and values a user's own file at this path may have, where that is more than a
        manifest may have: its host keeps other things in it too."""
        return None

    def wrapped(self, plugin: Plugin, environ: Mapping[str, str]) -> WrappedCommand | None:
        """The command behind `runner run`, if the program of this plugin is the runner itself, put there so
        that a host starts the command in a cage."""
        return None

    def recognises(self, document: Document) -> bool:
        """Whether a parsed document with an unknown file name is one of its manifests."""
        ...

    # Whether requests of a plugin follow from its configuration. Then `read` gets it, and exec, explain and
    # check take --config too. Otherwise only the dialect gets it.
    config_shapes_cage: bool = False

    takes_secrets: bool = False  # whether the dialect delivers secrets of the operator (--secrets)
    secret_files: bool = False  # whether the cage delivers them, as files in memory (--secret)

    def read(
        self, document: Document, *, server: str | None, home: str, options: Mapping[str, str], config: Any
    ) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
        """The plugin, from the text alone; None if there is an error among the diagnostics. `config`: None
        if there is none."""
        ...

    # Whether options only choose from what the manifest says, and narrow it. Then the plugin without options
    # is cached, and `shape` applies the options to it.
    options_shape_plugin: bool = False

    def shape(
        self, plugin: Plugin, options: Mapping[str, str]
    ) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
        """What `read` with these options gives, from what it gives without any."""
        raise AssertionError(f"the options of the contract {self.name} need its manifest")

    def servers(self, document: Document) -> tuple[str, ...]:
        """The names that --server can choose from, where `several_plugins` is set."""
        return ()

    def remarks(self, document: Document) -> tuple[Diagnostic, ...]:
        """Warnings about the whole manifest, which belong to none of its `servers`."""
        return ()

    def fill(
        self, plugin: Plugin, variable: Callable[[str], str | None], read_file: Callable[[str, KeyPath], str]
    ) -> tuple[Plugin, tuple[str, ...]]:
        """A plugin whose words are a template, with these filled in, and what only a person could answer.

        `variable`: a variable of the host; None if there is none, or it is withheld. `read_file`: the text of
        a file and where the manifest names it. It refuses the launch if the plugin may not have the file.
        """
        raise AssertionError(f"the contract {self.name} has no templates")

    def is_users_own(self, path: str, environ: Mapping[str, str]) -> bool:
        """Whether a manifest at this path is the calling user's own: no project can have brought it along."""
        return False

    def find_entry(self, wrapped: WrappedEntry, environ: Mapping[str, str]) -> EntryFound:
        """The entry that a wrapped command line says it came from. `environ`: as the host set it. Raises
        ValueError if the options are none of an entry's, or the manifest has no entry with this command line
        and these variables."""
        raise ValueError(f"the contract {self.name} has no wrapped entries")

    def origin(self, document: Document) -> str:
        """Whose file it is, where a contract reads the files of several programs; empty: it does not say."""
        return ""

    def check_files(self, document: Document, plugin: Plugin) -> tuple[Diagnostic, ...]:
        """What the manifest promises about the files beside it and is not so. Only `runner check` asks."""
        return ()

    def json_schema(self) -> dict[str, object]:
        """The manifest as JSON Schema, for editors."""
        ...

    def switches(self, environ: Mapping[str, str]) -> Switches:
        """What the operator says through the contract's own environment variables."""
        return Switches()

    def launch_fault(self, plugin: Plugin) -> LaunchFault | None:
        """Why the plugin cannot run on this machine, as far as the manifest says it."""
        return None

    def check_options(self, plugin: Plugin, options: Mapping[str, str]) -> tuple[Diagnostic, ...]:
        """Errors in what the options name, by the files beside the manifest. `read` has found none by the
        text alone. Only `runner check` asks."""
        return ()

    def choice_fault(self, plugin: Plugin, options: Mapping[str, str]) -> LaunchFault | None:
        """Why `runner exec` makes no cage by these options: one has to choose and was not given, or what one
        names may be looked at, and not be run."""
        return None

    def lint(self, document: Document, plugin: Plugin) -> tuple[Diagnostic, ...]:
        """What is allowed and unwise, for `runner package lint`."""
        return ()

    def host_places(self) -> HostPlaces:
        """Asked of every contract for every launch with a writable folder, whatever the plugin's contract."""
        return HostPlaces()

    # --- calls that shape the cage --------------------------------------------------------------------------

    # Whether the cage depends on the call: on the export that is called, on files the call brings along. Then
    # every call is prepared before its launch, and its process serves only calls that were prepared alike.
    prepares_calls: bool = False

    def prepare(
        self,
        plugin: Plugin,
        call: Call,
        *,
        seconds: float | None,
        options: Mapping[str, str],
        secrets: Mapping[str, str],
        config: Any,
        now: float,
    ) -> Prepared:
        """Complete a call before anything is started. Raises CallRefused if it cannot succeed.

        `seconds`: the caller's time limit. `now`: seconds since 1970, when the call was accepted. `secrets`:
        the operator's, by name, and the values of secret options, by their flag ("--gateway-token").
        """
        raise AssertionError(f"the contract {self.name} prepares no calls")

    def catalogue(self, plugin: Plugin) -> Mapping[str, list[dict[str, Any]]]:
        """All that the plugin exposes, by kind ("tools"), from the manifest and the files beside it. There is
        no cage before there is a call, so `runner tools` starts nothing."""
        raise AssertionError(f"the contract {self.name} prepares no calls")

    def with_delegation(self, prepared: Prepared, delegation: Delegation) -> Prepared:
        """The call with the credentials that it asked for. Raises CallRefused if they are not usable."""
        raise AssertionError(f"the contract {self.name} delegates no credentials")

    def reuses(self, plugin: Plugin) -> int:
        """How many processes may live at once and serve one prepared call after the other; 0: each process
        serves one call."""
        return 0

    def concurrent(self, plugin: Plugin) -> int:
        """How many calls may run at once where each process serves one; 0: any number."""
        return 0

    prepared_options: tuple[str, ...] = ()  # names of options that only `prepare` sets
    # Keys of a call's context that tell callers apart. No two of them share a process.
    caller_keys: tuple[str, ...] = ()
    # Names of options that differ from call to call, and say nothing about a cage that serves several.
    options_of_one_call: tuple[str, ...] = ()

    def record(
        self, plugin: Plugin, call: Call, end: CallEnd, options: Mapping[str, str]
    ) -> Mapping[str, Any] | None:
        """The contract's own record of a call, which becomes `invocation` in the report."""
        return None

    # --- its conversations --------------------------------------------------------------------------------

    kinds: tuple[str, ...] = ("tool",)  # what `runner call --kind` can mean; the first is the default
    context: Mapping[str, tuple[str, ...]] = {}  # kind -> keys of a call's context that are sent
    lists: tuple[Listing, ...] = ()  # what a running plugin can be asked to list, where asking tells more
    declared: tuple[str, ...] = ()  # kinds of exports that `runner tools` takes from the manifest
    one_shot: bool = False  # one process serves one call
    # Whether `runner call MANIFEST NAME -- ARGS` gives ARGS to the call ({"argv": ARGS} is its input), and
    # not to the program.
    arguments_are_input: bool = False
    # Whether a hook that fails has the policy's answer (on_failure under [hooks]). Otherwise it contributes
    # nothing.
    policy_answers_hooks: bool = False

    def dialect(self, setting: Setting) -> Dialect: ...

    def inspector(self, setting: Setting) -> Inspector:
        """For `runner exec --inspect`: checks what plugin and host say to each other."""
        ...

    def services(self, plugin: Plugin, allowance: Allowance) -> HostMethods:
        """What a plugin may ask of its host."""
        from runner.protocol.host_services import NoHostMethods

        return NoHostMethods()

    def rights(self, plugin: Plugin) -> tuple[tuple[str, str], ...]:
        """What the manifest says that the plugin may ask of its host, for `explain`: a word, and what it
        covers."""
        return ()

    def provide(self, plugin: Plugin, services: Services, allowance: Allowance) -> Services:
        """The host's services, with those that the runner itself has for plugins of this contract."""
        return services

    def command_output(self, call: Call, value: Any) -> CommandOutput | None:
        """The answer to a call as the output of a command, which `runner call` makes its own; None: it is a
        value to print."""
        return None

    def event(self, call: Call) -> tuple[str, Any]:
        """Method and params of the notification for a call of kind "event", where `kinds` has it."""
        raise AssertionError(f"the contract {self.name} has no events")

    # --- its example --------------------------------------------------------------------------------------

    # The folder example/ beside the contract's modules is a small plugin, which `runner new` copies. The new
    # plugin's name takes the place of the id in the example's manifest, wherever that word stands in a file.
    example_call: ExampleCall = ExampleCall()  # what `runner new` tells people to try
    example_namespace: str = ""  # how the ids of the example, and of what `runner new` makes of it, begin

    # --- its command line ---------------------------------------------------------------------------------

    verbs: tuple[ContractVerb, ...] = ()
    options: tuple[ContractOption, ...] = ()
