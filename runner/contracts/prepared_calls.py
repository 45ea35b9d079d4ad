"""Cages that depend on a call: which options choose one, and how each call is prepared before its launch."""

from __future__ import annotations

from sandbox.speed.typed import TYPE_CHECKING, Any, Literal, Protocol
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.plugin import LaunchFault, Plugin
    from runner.protocol.dialect import Call, CallEnd
    from runner.protocol.host_services import Delegation, DelegationRequest
    from sandbox.document.diagnostic import Diagnostic


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
