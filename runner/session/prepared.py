"""A call that is prepared before its launch: its cage, its deadline and its record depend on it.

The library and the command line both prepare calls here, for contracts that have `prepared_calls`. A call
that cannot succeed is refused here, and nothing is started for it.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from runner.contracts.registry import find_contract
from runner.exceptions import InvalidCall, PluginError, PluginFailure
from runner.launch.failures import judge_diagnostics
from runner.launch.stages import Invocation
from runner.outcome import Outcome
from runner.plugin import Plugin
from runner.protocol.dialect import Call, CallEnd, CallRefused, Refusal, Violation
from runner.protocol.host_services import (
    DelegationRequest,
    Gateway,
    Granted,
    HostError,
    Services,
    granting,
)
from runner.protocol.secrets import Secrets
from runner.session.pending import Deadline
from sandbox.cell.contents import Contents

if TYPE_CHECKING:
    from runner.contracts.contract import Contract
    from runner.contracts.prepared_calls import Prepared, PreparedCalls

# The outcome of a call that its caller gave up.
GIVEN_UP = Outcome("cancelled", "call", "the caller gave the call up", "given_up")


class PreparedCall(NamedTuple):
    invocation: Invocation  # with the options of this call
    plugin: Plugin  # as in the manifest, before the options chose an export
    prepared: Prepared
    secrets: Secrets  # none of these texts may be shown
    began: float  # when the call was accepted: seconds since 1970
    accepted: float  # the same on the monotonic clock
    deadline: Deadline = Deadline()  # set when trio runs

    @property
    def call(self) -> Call:
        """Completed: what the dialect sends."""
        return self.prepared.call

    @property
    def contract(self) -> Contract:
        return find_contract(self.plugin.contract)

    @property
    def calls(self) -> PreparedCalls:
        return _calls(self.contract)

    @property
    def caller(self) -> tuple[Any, ...]:
        """Whose call it is, by its context."""
        return tuple((name, self.call.context.get(name)) for name in self.calls.CALLER_KEYS)

    @property
    def seconds(self) -> float:
        """Its time limit, counted from its acceptance."""
        return float(self.prepared.options.get("timeout", math.inf))

    def with_deadline(self, now: float) -> PreparedCall:
        """The call with its deadline on trio's clock. `now`: the current time of that clock."""
        left = self.seconds - (time.monotonic() - self.accepted)
        return self._replace(deadline=Deadline(now + left, self.seconds))

    def refuse(self, event: Refusal | Violation, secrets: Secrets) -> PluginError | PluginFailure:
        """The exception for a call that was complete and is refused later."""
        options = self.prepared.options
        return _refused(self.plugin, self.call, options, secrets, self.began, CallRefused(event))

    def with_prepared(self, prepared: Prepared, secrets: Secrets) -> PreparedCall:
        made = _complete(self.invocation, self.plugin, prepared, secrets, self.began, self.accepted)
        return made._replace(deadline=self.deadline)

    def record(self, end: CallEnd) -> dict[str, Any]:
        """The contract's own record of how it ended, without secrets."""
        return _record(self.plugin, self.call, end, self.prepared.options, self.secrets, self.began)


def _calls(contract: Contract) -> PreparedCalls:
    found = contract.prepared_calls
    assert found is not None  # no call of another contract is prepared
    return found


def _record(
    plugin: Plugin, call: Call, end: CallEnd, options: Mapping[str, str], secrets: Secrets, began: float
) -> dict[str, Any]:
    timed = end._replace(began=began, ended=end.ended or time.time())
    return dict(secrets.hide_in(_calls(find_contract(plugin.contract)).record(plugin, call, timed, options)))


def complete_call(
    invocation: Invocation,
    call: Call,
    *,
    seconds: float | None = None,
    secrets: Mapping[str, Any] | None = None,
    config: Any = None,
) -> PreparedCall:
    """Prepare a call. Reads files, so it must not run in an event loop. Raises InvalidCall, and PluginFailure
    if the manifest has a fault.

    `secrets`: the operator's, by name, and values of secret options, by their flag.
    """
    began, accepted = time.time(), time.monotonic()
    plugin = read_plugin(invocation._replace(options=()))
    contract = find_contract(plugin.contract)
    # From here on no local variable has a text of a secret: a traceback may be printed with them.
    given = secrets = _with_secret_options(secrets, invocation, contract)
    named = {option.name for option in contract.options if option.secret}
    invocation = invocation._replace(
        options=tuple(each for each in invocation.options if each[0] not in named)
    )
    options = dict(invocation.options)
    try:
        prepared = _calls(contract).prepare(
            plugin, call, seconds=seconds, options=options, secrets=given, config=config, now=began
        )
    except CallRefused as refused:
        known = call if refused.context is None else call._replace(context=refused.context)
        raise _refused(plugin, known, options, given, began, refused) from None
    return _complete(invocation, plugin, prepared, given, began, accepted)


def _with_secret_options(
    secrets: Mapping[str, Any] | None, invocation: Invocation, contract: Contract
) -> Secrets:
    options = dict(invocation.options)
    flags = {option.flag: option.name for option in contract.options if option.secret}
    return Secrets(
        {**(secrets or {}), **{flag: options[name] for flag, name in flags.items() if name in options}}
    )


def _complete(
    invocation: Invocation,
    plugin: Plugin,
    prepared: Prepared,
    given: Mapping[str, Any],
    began: float,
    accepted: float,
) -> PreparedCall:
    return PreparedCall(
        invocation._replace(options=tuple(prepared.options.items())),
        plugin,
        prepared,
        Secrets({**given, **prepared.secrets}),
        began,
        accepted,
    )


def _refused(
    plugin: Plugin,
    call: Call,
    options: Mapping[str, str],
    secrets: Secrets,
    began: float,
    refused: CallRefused,
) -> PluginError | PluginFailure:
    """The exception for a refused call, with its record. Nothing was started."""
    event = refused.event
    error: PluginError | PluginFailure
    if isinstance(event, Refusal):
        event = event._replace(message=secrets.hide(event.message), data=secrets.hide_in(event.data))
        error = InvalidCall(event)
        end = CallEnd(error.outcome, refusal=event)
    else:
        outcome = Outcome(event.code, "call", secrets.hide(event.message), event.cause, event.hint)
        error = PluginFailure(outcome)
        end = CallEnd(error.outcome)
    error.invocation = _record(plugin, call, end, options, secrets, began)
    return error


def cage_contents(prepared: PreparedCall) -> Contents:
    """The memory files of the cage: files of the call, and the secrets that the cage has a file for. Reads
    the manifest. Raises PluginFailure."""
    from runner.launch.read import secret_contents  # most contracts prepare no calls

    wanted = {file.secret for file in read_plugin(prepared.invocation).spec.memory_files if file.secret}
    given = {name: prepared.secrets[name] for name in wanted if name in prepared.secrets}
    try:
        held = secret_contents(prepared.contract, given)
        return Contents(None if held is None else held.secrets, prepared.prepared.contents)
    except ValueError as error:
        hint = "give shorter secrets, or a call with less"
        raise PluginFailure(Outcome("launch_failed", "launch", str(error), "contents", hint)) from None


def serves_one_call(prepared: PreparedCall) -> bool:
    """Whether the process of this call serves no other. Reads the manifest. Raises PluginFailure."""
    return prepared.calls.reuses(read_plugin(prepared.invocation)) == 0


def read_plugin(invocation: Invocation) -> Plugin:
    """The plugin as its manifest and the options describe it. Raises PluginFailure if it has a fault."""
    from runner.launch.read import read_invocation

    read = read_invocation(invocation)
    if read.plugin is None:
        outcome = judge_diagnostics(read.diagnostics, "manifest")
        from runner.launch.report import explain_failure

        raise PluginFailure(outcome, tuple(explain_failure(None, outcome)))
    return read.plugin


# --- on trio ------------------------------------------------------------------------------------------------


FAILED = "auth.delegation_failed"  # the code of a call that got no credentials
_NO_CREDENTIALS = "the gateway service of the host gave no credentials"


async def prepare_call(
    invocation: Invocation,
    call: Call,
    *,
    seconds: float | None = None,
    secrets: Mapping[str, Any] | None = None,
    config: Any = None,
    services: Services | None = None,
    on_given_up: Callable[[dict[str, Any] | None], None] | None = None,
) -> PreparedCall:
    """Run `complete_call` in a thread, and get the credentials. Raises InvalidCall and PluginFailure; nothing
    was started then.

    `on_given_up`: called with the record of a call whose caller was cancelled meanwhile.
    """
    complete = functools.partial(
        complete_call, invocation, call, seconds=seconds, secrets=secrets, config=config
    )
    completed = (await trio.to_thread.run_sync(complete)).with_deadline(trio.current_time())
    gateway = None if services is None else services.gateway
    if completed.prepared.delegation is None or gateway is None:
        return completed
    try:
        with trio.move_on_at(completed.deadline.at):
            return await _delegate(completed, gateway, completed.prepared.delegation)
    except (PluginError, PluginFailure):
        raise
    except BaseException:
        if on_given_up is not None:
            on_given_up(completed.record(CallEnd(GIVEN_UP)))
        raise
    failure = PluginFailure(completed.deadline.passed("launch", _NO_CREDENTIALS))
    failure.invocation = completed.record(CallEnd(failure.outcome))
    raise failure


async def _delegate(completed: PreparedCall, gateway: Gateway, asked: DelegationRequest) -> PreparedCall:
    known = completed.secrets
    try:
        with granting(Granted(completed.plugin)):
            delegation = await gateway.delegate(asked)
        known = Secrets({**known, "delegation": delegation.token})
        delegated = completed.calls.with_delegation(completed.prepared, delegation)
    except CallRefused as refused:
        raise completed.refuse(refused.event, known) from None
    except Exception as error:  # noqa: BLE001 -- a bug of the service; its caller gets a refused call
        why = str(error) if isinstance(error, HostError) else f"{type(error).__name__} in the service"
        message = f"the gateway service gave no credentials for this call: {why}"
        raise completed.refuse(Refusal(0, FAILED, message, "failed"), known) from None
    return completed.with_prepared(delegated, known)
