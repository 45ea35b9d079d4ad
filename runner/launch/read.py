"""From an invocation to its plugin: the manifest is read, or the command of the command line becomes one."""

from __future__ import annotations

from runner.contracts.registry import command_contract
from runner.launch.command import plugin_of
from runner.launch.stages import Invocation
from runner.manifest.load import ManifestRead, contract_at, load
from sandbox.speed.typed import Mapping


def read_invocation(
    invocation: Invocation, *, options: Mapping[str, str] | None = None, text: bytes | None = None
) -> ManifestRead:
    """`options`: of the contract, in place of the invocation's own. `text`: the manifest's bytes, if it was
    read already."""
    if invocation.command is not None:
        return ManifestRead(plugin_of(invocation.command, contract_of(invocation) or ""))
    return load(
        invocation.manifest,
        contract=invocation.contract,
        server=invocation.server,
        options=dict(invocation.options) if options is None else options,
        config=invocation.config,
        text=text,
    )


def contract_of(invocation: Invocation) -> str | None:
    """The name of its contract. None: the manifest has none, or has a fault, which reading it reports."""
    if invocation.command is not None:
        return command_contract()
    return contract_at(invocation.manifest, invocation.contract)
