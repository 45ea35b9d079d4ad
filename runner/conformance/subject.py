"""The plugin that is tried: what is launched, and what is known about it beforehand."""

from __future__ import annotations

from typing import Any

from runner.conformance.conversation import CageLaunch
from runner.contracts.contract import Contract
from runner.launch.read import secret_contents
from runner.launch.stages import Invocation
from runner.plugin import Plugin
from runner.protocol.dialect import Call
from runner.protocol.secrets import Secrets
from runner.session.prepared import cage_contents, complete_call, read_plugin
from sandbox.speed.value import NamedTuple


class TrialSubject(NamedTuple):
    launch: CageLaunch
    plugin: Plugin | None  # None: it is a command
    call: Call | None
    secrets: Secrets  # none of these texts may be shown


def prepare_subject(
    invocation: Invocation, contract: Contract, call: Call | None, config: Any, secrets: Secrets
) -> TrialSubject:
    """Raises PluginError or PluginFailure: the manifest has a fault, or the call cannot succeed."""
    if invocation.command is not None:
        return TrialSubject(CageLaunch(invocation), None, call, Secrets())
    plugin = read_plugin(invocation)
    if contract.prepared_calls is None or call is None:
        launch = CageLaunch(invocation, secret_contents(contract, secrets))
        return TrialSubject(launch, plugin, call, secrets)
    prepared = complete_call(invocation, call, secrets=secrets, config=config)
    launch = CageLaunch(prepared.invocation, cage_contents(prepared))
    return TrialSubject(launch, prepared.plugin, prepared.call, prepared.secrets)
