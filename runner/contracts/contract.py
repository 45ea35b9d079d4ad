"""The interface of a plugin contract. The rest of the runner knows nothing else about contracts.

`Contract` is what each of them answers. Behind it is what few have: a new contract can skip that.

Each folder of runner/contracts/ exposes one `CONTRACT` in its `__init__.py`. That file must be cheap to
import, because every launch imports it. A method imports the heavy modules (pydantic models, the dialect)
when it is called.

    class ToyContract(Contract):
        name = "toy"
        ...

    CONTRACT = ToyContract()
"""

from __future__ import annotations

from sandbox.speed.typed import TYPE_CHECKING, Any, Callable, Literal, Protocol
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from typing import TypeVar

    from runner.plugin import Allowance, Plugin
    from runner.protocol.bus import Handler
    from runner.protocol.dialect import Call, CallEnd
    from runner.protocol.host_services import Ask, Delegation, DelegationRequest, HostMethods, Services
    from runner.supervision import Supervision
    from sandbox.document.diagnostic import Diagnostic
    from sandbox.document.read import Document, Format
    from sandbox.paths.guarded import GuardedName
    from sandbox.spec import KeyPath

    Found = TypeVar("Found")

Layout = Literal["folder", "archive", "root", "tar"]
# "config": requests of a plugin follow from its configuration. Then `read` gets it, and exec, explain and
# check take --config too; otherwise only the dialect gets it.
# "secrets": the dialect sends them (--secrets). "secret_files": files in the cage's memory (--secret).
# "hook_answers": the policy's answer in place of a hook that fails (on_failure under [hooks]). Otherwise such
# a hook contributes nothing.
Takes = tuple[Literal["config", "secrets", "secret_files", "hook_answers"], ...]
Declarations = tuple[str, tuple[tuple[str, ...], ...]]  # a title, and rows of as many cells each


class Listing(NamedTuple):
    """A list of what a plugin has, for `runner tools`."""

    what: str  # the name of the list: "tools"
    declared: bool = False  # it is in the manifest (Plugin.exports), and the plugin is not asked
    kind: str = ""  # the kind of a call whose names only the list can tell. Empty: they are checked before
    key: str = "name"  # the key of an entry that such a call takes
    offered_as: str = ""  # the key of Identity.details that says whether the plugin has the list
    complete: bool = True  # False: a call may also take what the list does not name


class ContractOption(NamedTuple):
    """An option for plugins of this contract only. Its value reaches `read` and the dialect."""

    flag: str  # "--binding"
    metavar: str
    help: str
    verbs: tuple[str, ...] = ("exec", "call", "tools", "explain", "check")  # (): only `prepare` sets it
    names_file: bool = False  # the shell completes file names
    # The value is the name of a file. The file is read once, before the launch: `options` has its text, and
    # its name under the option's name with "_file" behind it.
    reads_file: bool = False
    secret: bool = False  # its value is a secret: only `prepare` gets it, and it is never stored or shown

    @property
    def name(self) -> str:
        """The key of its value in `options`."""
        return self.flag.lstrip("-").replace("-", "_")


class ContractVerb(NamedTuple):
    """A verb that this contract adds to the command line."""

    name: str
    module: str  # "runner.contracts.NAME.VERB", a `Verb`
    help: str
    group: str = "run"  # where `runner --help` lists it: a key of runner.cli.GROUPS


class Verb(Protocol):
    """The module of a verb. It may also have `advice(message)`, which explains a usage error."""

    NAME: str
    EXAMPLE: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, args: argparse.Namespace) -> int: ...


class Example(NamedTuple):
    """The plugin in the contract's example/, which `runner new` copies. The new plugin's name takes the place
    of the id in the example's manifest, wherever that word stands in a file."""

    call: str = "greet"  # a call that succeeds. Its name may contain the id
    input: str = '{"name": "world"}'  # JSON. With {} in its place the call fails
    namespace: str = ""  # prefix of the id, also for plugins that `runner new` makes


class LaunchFault(NamedTuple):
    """Why a plugin is not launched, although nothing is wrong with its manifest."""

    cause: str  # stable id
    message: str
    hint: str


class Contract(Protocol):
    """What every contract answers. Members without a value are required; the others have the value of a
    contract without that feature. The dialect, the inspector and the manifest's schema are not members: see
    runner/contracts/registry.py for the modules they come from."""

    # --- its manifests ------------------------------------------------------------------------------------

    name: str  # the name of its folder, and what --contract takes
    about: str  # one line for `runner contracts`: whose plugins they are, and how they talk
    format: Format
    file_names: tuple[str, ...]  # in order of preference
    sign: str  # how its manifests are recognised, whatever their file name, for messages
    no_command_hint: str  # what to do about a manifest without a command to start

    # How a folder holds its plugins. "archive": also in its only subdirectory, as an unpacked archive does.
    # "root": also side by side, each in a folder of its own. `check` and `tools` take the root, and skip a
    # plugin whose manifest has an error. "tar": a tar of the folder can be given in its place.
    layout: Layout = "folder"
    takes: Takes = ()  # what the operator may give a plugin besides its manifest

    def recognises(self, document: Document) -> bool:
        """Whether a parsed document is one of its manifests, by keys that those of other contracts do not
        have. Where no contract recognises it, the file's name counts."""
        ...

    def read(
        self, document: Document, *, server: str | None, home: str, options: Mapping[str, str], config: Any
    ) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
        """The plugin, from the text alone; None if there is an error among the diagnostics. `config`: None
        if there is none."""
        ...

    def check_files(self, document: Document, plugin: Plugin | None) -> tuple[Diagnostic, ...]:
        """Faults of the files that the manifest refers to. Only `runner check` asks. `plugin` is None if the
        manifest has faults itself."""
        return ()

    def launch_fault(self, plugin: Plugin) -> LaunchFault | None:
        """Returns why the plugin cannot run on this machine, judged by the manifest alone."""
        return None

    # --- its conversations --------------------------------------------------------------------------------

    # What `runner call --kind` can mean, each with the keys of a call's context that are sent along. The
    # first is the default.
    calls: Mapping[str, tuple[str, ...]] = {"tool": ()}
    lists: tuple[Listing, ...] = (Listing("tools"),)  # what `runner tools` shows
    # Whether entries of its lists, and the data of a tool's error, are what the gateway's clients read.
    plain_entries: bool = False

    def content_of(self, value: Any) -> Mapping[str, Any] | None:
        """A tool's result as the gateway's clients read it: content, structuredContent and isError. None: it
        is any JSON value."""
        return None

    def declared_tools(self, plugin: Plugin) -> Sequence[Mapping[str, Any]] | None:
        """The tools with descriptions and schemas, from the manifest and the files beside it. None: only the
        running plugin knows them."""
        calls = self.prepared_calls
        return None if calls is None else calls.catalogue(plugin)["tools"]

    def services(self, plugin: Plugin, allowance: Allowance) -> HostMethods:
        """What a plugin may ask of its host."""
        from runner.protocol.host_services import NoHostMethods

        return NoHostMethods()

    def provide(self, plugin: Plugin, services: Services, allowance: Allowance) -> Services:
        """The host's services, with those that the runner itself has for plugins of this contract."""
        return services

    def rights(self, plugin: Plugin) -> tuple[tuple[str, str], ...]:
        """What the plugin may ask of its host by its manifest, for `explain`: name and description of each
        right."""
        return ()

    def hooks_for(self, plugin: Plugin, event: str) -> tuple[str, ...]:
        """Names of the plugin's hooks that want events of this type, by its manifest."""
        hooks = dict(plugin.exports).get("hooks", ()) if "hook" in self.calls else ()
        return (event,) if event in hooks else ()

    # --- its supervision ----------------------------------------------------------------------------------

    def supervision(self, plugin: Plugin) -> Supervision:
        """When a supervisor starts, restarts and ends the plugin."""
        from runner.supervision import Supervision

        return Supervision()

    # --- its command line ---------------------------------------------------------------------------------

    verbs: tuple[ContractVerb, ...] = ()
    options: tuple[ContractOption, ...] = ()
    example: Example = Example()

    # --- what few contracts have. The types of these stand below --------------------------------------------

    one_shot: bool = False  # one process serves one call
    switches: Switches | None = None  # variables with which its own host is configured

    def declarations(self, plugin: Plugin) -> tuple[Declarations, ...]:
        """What else the manifest declares, for `explain`: tables with a title and rows."""
        return ()

    def lifecycle_notice(
        self, plugin: Plugin, what: str, facts: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, Any]] | None:
        """What plugins of this contract are told about the life of this one: method and params of a
        notification. `what`: "crashed", "respawning", "respawned", "gave_up" or "restarted"; `facts`: of
        LifecycleNews, in runner/lifecycle/spec.py. None: they are told nothing."""
        return None

    def actions(self, plugin: Plugin, ask: Ask) -> Mapping[str, Handler]:
        """What other plugins on the same bus may invoke of this one, by name. `ask` calls it."""
        return {}

    @property
    def configurations(self) -> HostConfigurations | None:
        """Its manifests are the configuration files of hosts."""
        return None

    @property
    def choice(self) -> Choice | None:
        """Its options choose from what the manifest says."""
        return None

    @property
    def prepared_calls(self) -> PreparedCalls | None:
        """Its cages depend on the call."""
        return None

    @property
    def package_rules(self) -> PackageRules | None:
        """Its packages have rules that `runner package lint` checks."""
        return None

    @property
    def commands(self) -> CommandCalls | None:
        """Its tools are commands."""
        return None

    @property
    def bindings(self) -> Bindings | None:
        """Its exports are bound to orgs and projects, by records that a control plane keeps."""
        return None


# --- what few contracts have --------------------------------------------------------------------------------


class Switches(NamedTuple):
    """Variables of the operator's environment that configure the contract's own host, and that count here
    too: the runner is started in its place."""

    yes: tuple[str, ...]  # the values that set one. Any other value does not
    require_sandbox: str  # the variable that refuses manifests without a sandbox
    host_network: str  # the variable that asks for the host's network. The policy says whether that counts

    def named(self, variable: str, environ: Mapping[str, str]) -> str:
        """The name of the variable if it is set, or ''."""
        return variable if environ.get(variable) in self.yes else ""


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

    def places(self) -> HostPlaces:
        """Called for every launch with a writable folder, for plugins of all contracts."""
        ...


class Choice(Protocol):
    """A contract whose options only choose from what the manifest says, and narrow it: the plugin without
    options is cached, and `shape` applies the options to it. A module, imported when it is asked for."""

    def shape(
        self, plugin: Plugin, options: Mapping[str, str]
    ) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
        """Apply the options to a plugin that `Contract.read` returned without options."""
        ...

    def check_options(self, plugin: Plugin, options: Mapping[str, str]) -> tuple[Diagnostic, ...]:
        """Errors in what the options name, by the files beside the manifest. `shape` has found none by the
        text alone. Only `runner check` asks."""
        ...

    def choice_fault(self, plugin: Plugin, options: Mapping[str, str]) -> LaunchFault | None:
        """Returns why `runner exec` refuses these options: a required choice is missing, or the choice may be
        explained but not run."""
        ...


class Prepared(NamedTuple):
    """A call, and what its launch needs to know of it."""

    call: Call  # completed: what the dialect sends
    options: Mapping[str, str]  # of the contract, for `read` and the dialect
    contents: Mapping[str, bytes]  # of the memory files, by their path in the cage
    secrets: Mapping[str, str]  # texts that must not be shown, including those in the call itself
    delegation: DelegationRequest | None = None  # credentials that the host's own service has to make


class PreparedCalls(Protocol):
    """A contract whose cages depend on the call: on the export that is called, and on files of the call.
    Every call is prepared before its launch, and its process serves only calls that were prepared alike. A
    module, imported when it is asked for."""

    @property
    def CALLER_KEYS(self) -> tuple[str, ...]:  # noqa: N802 -- a constant of the module
        """Keys of a call's context that identify the caller. Different callers never share a process."""
        ...

    @property
    def OPTIONS_OF_ONE_CALL(self) -> tuple[str, ...]:  # noqa: N802
        """Names of options that differ from call to call and do not affect the cage."""
        ...

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
        ...

    def with_delegation(self, prepared: Prepared, delegation: Delegation) -> Prepared:
        """The call with the credentials that it asked for. Raises CallRefused if they are not usable."""
        ...

    def reuses(self, plugin: Plugin) -> int:
        """How many processes may run at once if each serves one prepared call after the other; 0: each
        process serves one call."""
        ...

    def concurrent(self, plugin: Plugin) -> int:
        """How many calls may run at once where each process serves one; 0: any number."""
        ...

    def record(
        self, plugin: Plugin, call: Call, end: CallEnd, options: Mapping[str, str]
    ) -> Mapping[str, Any]:
        """The contract's own record of a call, which becomes `invocation` in the report."""
        ...

    def effect(
        self, plugin: Plugin, name: str
    ) -> Literal["read_only", "idempotent_write", "non_idempotent_write", "unknown"]:
        """What a call of the export with this name does to the world, by the manifest. `plugin`: by its
        manifest alone. A call whose outcome was lost is repeated only if that is harmless."""
        ...

    def catalogue(self, plugin: Plugin) -> Mapping[str, list[dict[str, Any]]]:
        """All that the plugin exposes, by kind ("tools"), from the manifest and the files beside it. `runner
        tools` starts nothing, because the cage depends on a call."""
        ...


class PackageRules(Protocol):
    """A contract with rules for the packages of its plugins. A module, imported when it is asked for."""

    def lint(self, document: Document, plugin: Plugin) -> tuple[Diagnostic, ...]:
        """Warnings for `runner package lint`."""
        ...


class BoundExport(NamedTuple):
    """What a control plane has to know of a binding record."""

    export: str
    kind: str  # the list that the export is in: "tools", "hooks", …
    org: str
    project: str = ""  # empty: the whole org
    active: bool = True
    traffic_percent: int = 100
    slots: Mapping[str, str | None] = {}  # of secrets -> secret://ORG/NAME; None: no secret


class Bindings(Protocol):
    """A contract whose exports are bound to orgs and projects by records. A module, imported when it is asked
    for."""

    def read_record(
        self, text: str, file: str, plugin: Plugin, *, own_id: str, orgs: Mapping[str, Collection[str]]
    ) -> tuple[BoundExport | None, tuple[Diagnostic, ...]]:
        """The record in `text`, JSON, checked against the package and its files. None: it has an error. The
        first step of the check that finds one is the last. `file`: for messages. `own_id`: of a record that
        has no id yet. `orgs`: those that records may be for, with the references to their secrets."""
        ...

    def nearest(
        self, records: Iterable[Found], project: str | None, project_of: Callable[[Found], str | None]
    ) -> list[Found]:
        """The records that count in a project, of those of one org for one export: the project's own, or else
        those of the whole org. `project`: None, if any may be meant."""
        ...

    def is_selected(self, binding: str, context: Mapping[str, Any], percent: int) -> bool:
        """Whether a rollout to `percent` includes a call. The same session always gets the same answer."""
        ...


class CommandOutput(NamedTuple):
    stdout: bytes
    stderr: bytes
    status: int


class CommandCalls(Protocol):
    """A contract whose tools are commands: `runner call MANIFEST NAME -- ARGS` gives ARGS to the call (its
    input is {"argv": ARGS}), and not to the program."""

    def output(self, call: Call, value: Any) -> CommandOutput | None:
        """The answer as the output of a command, which `runner call` copies to its own streams; None: it is a
        value to print."""
        ...
