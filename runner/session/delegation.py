"""A call prepared on trio, with the credentials that the host's own gateway service makes for it."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import trio

from runner.exceptions import PluginError, PluginFailure
from runner.launch.stages import Invocation
from runner.protocol.dialect import Call, CallEnd, CallRefused, Refusal
from runner.protocol.host_services import (
    DelegationRequest,
    Gateway,
    Granted,
    HostError,
    Services,
    granting,
)
from runner.protocol.secrets import Secrets
from runner.session.open import open_session
from runner.session.prepared import GIVEN_UP, PreparedCall, cage_contents, complete_call
from runner.session.session import Session

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
    """`complete_call` in a thread, and the credentials. Raises InvalidCall and PluginFailure: then nothing
    was started.

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


@asynccontextmanager
async def open_prepared(
    prepared: PreparedCall,
    *,
    environ: Mapping[str, str],
    services: Services | None = None,
    config: Any = None,
    on_made: Callable[[Session], None] | None = None,
) -> AsyncIterator[Session]:
    """A session in a process that is started for this call. Raises PluginFailure."""
    contents = await trio.to_thread.run_sync(cage_contents, prepared)
    async with open_session(
        prepared.invocation,
        environ=environ,
        services=services,
        config=config,
        secrets=prepared.secrets,
        contents=contents,
        deadline=prepared.deadline,
        on_made=on_made,
    ) as session:
        del prepared, contents  # they may be large, and the process may live long
        yield session


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
