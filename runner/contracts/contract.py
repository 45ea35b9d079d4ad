"""The interface of a plugin contract. The rest of the runner knows nothing else about contracts.

`Contract` is what each of them answers. Its last section is what few have: a new contract can skip that.

Each folder of runner/contracts/ exposes one `CONTRACT` in its `__init__.py`. That file must be cheap to
import, because every launch imports it. A method imports the heavy modules (pydantic models, the dialect)
when it is called.

    class ToyContract(Contract):
        name = "toy"
        ...

    CONTRACT = ToyContract()
"""

from __future__ import annotations

from sandbox.speed.typed import TYPE_CHECKING, Any, Literal, Protocol
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from runner.contracts.bindings import Bindings
    from runner.contracts.configurations import HostConfigurations
    from runner.contracts.prepared_calls import Choice, PreparedCalls
    from runner.plugin import Allowance, LaunchFault, Plugin
    from runner.protocol.bus import Handler
    from runner.protocol.dialect import Call
    from runner.protocol.host_services import Ask, HostMethods, Services
    from runner.supervision import Supervision
    from sandbox.document.diagnostic import Diagnostic
    from sandbox.document.read import Document, Format

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


class CommandOutput(NamedTuple):
    stdout: bytes
    stderr: bytes
    status: int


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

    # --- what few contracts have --------------------------------------------------------------------------

    one_shot: bool = False  # one process serves one call
    # Its tools are commands: `runner call MANIFEST NAME -- ARGS` gives ARGS to the call (its input is
    # {"argv": ARGS}), and not to the program.
    commands: bool = False

    def command_output(self, call: Call, value: Any) -> CommandOutput | None:
        """The answer of a command, which `runner call` copies to its own streams; None: it is a value to
        print."""
        return None

    def switches(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Variables of the operator's environment that configure the contract's own host and are set. They
        count here too: the runner is started in that host's place. The key says what each asks for:
        "require_sandbox" (manifests without one are refused), "host_network" (the policy says whether that
        counts)."""
        return {}

    def lint(self, document: Document, plugin: Plugin) -> tuple[Diagnostic, ...]:
        """Warnings of `runner package lint`."""
        return ()

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
    def bindings(self) -> Bindings | None:
        """Its exports are bound to orgs and projects, by records that a control plane keeps."""
        return None
