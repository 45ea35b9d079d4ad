"""Invocation -> Loaded: read the manifest, or make a plugin of the command line."""

from __future__ import annotations

import os

from runner.contracts.registry import command_contract, find_contract
from runner.launch.command import plugin_of
from runner.launch.failures import judge_diagnostics
from runner.launch.stages import Invocation, Loaded, Stopwatch
from runner.manifest.load import ManifestRead, contract_at
from runner.manifest.load import load as load_manifest
from runner.outcome import EXEC_NOT_FOUND, EXEC_REFUSED, Failure, Outcome
from runner.plugin import Plugin
from sandbox import look
from sandbox.document.diagnostic import quoted
from sandbox.speed.typed import TYPE_CHECKING, Any, Mapping

if TYPE_CHECKING:
    from runner.contracts.contract import Contract
    from sandbox.cell.contents import Contents


def load(invocation: Invocation, watch: Stopwatch) -> Loaded:
    """Read the manifest. Raises Failure."""
    read = read_invocation(invocation)
    if read.plugin is None:
        raise Failure(judge_diagnostics(read.diagnostics, "manifest"), EXEC_REFUSED)
    loaded = Loaded(invocation, _with_present_parts(read.plugin), read.diagnostics)
    if read.plugin.entrypoint is None:
        outcome = Outcome(
            "launch_failed",
            "manifest",
            f"the manifest of {read.plugin.id} names no command to run",
            "no_entrypoint",
            find_contract(read.plugin.contract).no_command_hint,
        )
        raise Failure(outcome, EXEC_NOT_FOUND, loaded)
    fault = find_contract(read.plugin.contract).launch_fault(read.plugin)
    if fault is not None:
        outcome = Outcome("launch_failed", "manifest", fault.message, fault.cause, fault.hint)
        raise Failure(outcome, EXEC_REFUSED, loaded)
    return loaded._replace(timings=watch.lap("manifest"))


def _with_present_parts(plugin: Plugin) -> Plugin:
    """The plugin without the parts of its folder that do not exist. The cached manifest does not know that.
    If none exists they all stay, because no parts means the whole folder."""
    if plugin.root is None or not plugin.root_parts:
        return plugin
    root = plugin.root
    present = tuple(part for part in plugin.root_parts if look.lexists(os.path.join(root, part)))
    return plugin._replace(root_parts=present or plugin.root_parts)


def read_invocation(
    invocation: Invocation, *, options: Mapping[str, str] | None = None, text: bytes | None = None
) -> ManifestRead:
    """Read the manifest or the command. `options`: contract options instead of the invocation's own. `text`:
    the manifest's bytes, if it was already read."""
    if invocation.command is not None:
        return _from_store(ManifestRead(plugin_of(invocation.command, contract_of(invocation) or "")))
    read = load_manifest(
        invocation.manifest,
        contract=invocation.contract,
        server=invocation.server,
        options=dict(invocation.options) if options is None else options,
        config=invocation.config,
        text=text,
    )
    return _from_store(read)


def _from_store(read: ManifestRead) -> ManifestRead:
    """With the stored program of a plugin that a launcher would fetch."""
    hosts = None if read.plugin is None else find_contract(read.plugin.contract).configurations
    if read.plugin is None or hosts is None:
        return read
    return read._replace(plugin=hosts.installed(read.plugin, look.environment(os.environ)))


def contract_of(invocation: Invocation) -> str | None:
    """The name of the contract. None: the manifest has none, or has a fault that reading it reports."""
    if invocation.command is not None:
        return command_contract()
    return contract_at(invocation.manifest, invocation.contract)


def with_config(invocation: Invocation, config: Any) -> Invocation:
    """The invocation, with the plugin's configuration if its requests depend on it. Raises ValueError if that
    is not JSON."""
    from runner.protocol import wire

    name = None if config is None else contract_of(invocation)
    shapes = name is not None and "config" in find_contract(name).takes
    return invocation._replace(config=wire.encode(config).decode() if shapes else "")


def secret_contents(contract: Contract, secrets: Mapping[str, Any] | None) -> Contents | None:
    """The secrets that the cage delivers as files; None if the contract has none. Names with leading dashes
    are values of options and are left out. Raises ValueError if one is neither text nor bytes, or they are
    too large."""
    if not secrets or "secret_files" not in contract.takes:
        return None
    from sandbox.cell.contents import Contents

    found: dict[str, bytes] = {}
    for name, value in secrets.items():
        if name.startswith("--"):
            continue
        if not isinstance(value, str | bytes):
            raise ValueError(f"secrets: the value of {quoted(name)} has to be text or bytes")
        found[name] = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
    return Contents(found)
