"""A call of an export, completed before anything is started: its request, and what its cage needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from runner.contracts.prepared_calls import Prepared
from runner.contracts.vai import binding as bindings
from runner.contracts.vai.binding import Binding, narrow_export, read_binding
from runner.contracts.vai.call.context import (
    INACTIVE,
    INVALID_BINDING,
    INVALID_DELEGATION,
    INVALID_SCHEMA,
    SECRET_MISSING,
    describe,
    identify,
    invalid_input,
    make_api_gateway,
    refused,
)
from runner.contracts.vai.call.requests import PINNED, RequestInput, ids_in, make_request
from runner.contracts.vai.declared import DeclaredExport, declared_by
from runner.contracts.vai.dialect import GRACE_SECONDS
from runner.contracts.vai.package.schemas import PackageSchema, complete_config, explained, load_of
from runner.plugin import Plugin
from runner.protocol.dialect import Call, CallRefused, Violation
from runner.protocol.host_services import Delegation, DelegationRequest
from runner.protocol.secrets import Secrets
from runner.protocol.wire import encode
from sandbox.document.diagnostic import Diagnostic, DocumentError, did_you_mean, quoted

TOKEN = "--gateway-token"  # its key among the secrets

_CODES = {bindings.SECRET_MISSING: SECRET_MISSING, bindings.INACTIVE: INACTIVE}
_SHOWN_FAULTS = 3  # of a configuration in a message
_SHOWN_NAMES = 10  # of exports or slots in a message


class FileContents(dict[str, bytes]):
    """Files by their path in the cage. Its text, in a traceback or a log, has no content."""

    def __repr__(self) -> str:
        return repr({path: f"{len(content)} bytes" for path, content in self.items()})


def prepare(
    plugin: Plugin,
    call: Call,
    *,
    seconds: float | None,
    options: Mapping[str, str],
    secrets: Mapping[str, str],
    config: Any,
    now: float,
) -> Prepared:
    """See PreparedCalls.prepare. Raises CallRefused."""
    declared = _find(plugin, call)
    ids = identify(call, declared.kind, options, ids_in(declared.kind, call.input))
    try:
        return _complete(plugin, declared, call, ids, seconds, options, secrets, config, now)
    except CallRefused as error:
        error.context = ids
        raise


def _complete(
    plugin: Plugin,
    declared: DeclaredExport,
    call: Call,
    ids: dict[str, Any],
    seconds: float | None,
    options: Mapping[str, str],
    secrets: Mapping[str, str],
    config: Any,
    now: float,
) -> Prepared:
    """Make the prepared call. Adds the ids of the binding's scope to `ids`."""
    binding = _bind(plugin, declared, ids, options)
    if binding is not None:
        ids |= {"org_id": binding.org} | ({"project_id": binding.project} if binding.project else {})
    settings = _configure(plugin, declared, binding, config)
    export = narrow_export(declared, binding)
    _check_secrets(plugin, declared, binding, secrets)
    timeout = _timeout(export, seconds)
    context = describe(ids, export, now + timeout)
    gateway_url = _api_gateway_url(export, options, secrets)
    delegation = None
    if gateway_url:
        context["gateway"] = make_api_gateway(gateway_url, secrets[TOKEN], export.permissions.scopes)
    elif export.permissions.scopes:
        delegation = DelegationRequest(
            export.permissions.scopes,
            timeout + GRACE_SECONDS[export.kind],
            ids["invocation_id"],
            ids.get("org_id", ""),
            ids.get("project_id", ""),
        )
    input_schema, output_schema = (
        _load(plugin, name) for name in (export.input_schema, export.output_schema)
    )
    made = make_request(RequestInput(export, call.input, ids, context, settings, input_schema, now))
    record = {**ids, "deadline_at": context["deadline_at"]}
    record |= {"binding_id": binding.id} if binding is not None else {}
    record |= {PINNED: made.pinned} if made.pinned else {}
    completed = {
        "export": export.id,
        "invocation_id": ids["invocation_id"],
        "timeout": repr(float(timeout)),
        "output_schema": "" if output_schema is None else encode(output_schema.document).decode(),
    }
    completed |= {"artifact": made.artifact} if made.artifact else {}
    # Of several bindings the chosen one: what follows has no context to choose by.
    if binding is not None and binding.record:
        completed["binding"] = encode(binding.record).decode()
    return Prepared(
        Call(export.kind, export.id, made.body, record),
        {**options, **completed},
        FileContents({made.artifact: made.content} if made.artifact else {}),
        Secrets(secrets),
        delegation,
    )


def with_delegation(prepared: Prepared, delegation: Delegation) -> Prepared:
    """The call with the credentials that a service made for it. Without a scope among them the plugin gets no
    gateway. Raises CallRefused."""
    asked = prepared.delegation
    if asked is None:
        raise refused(INVALID_DELEGATION, "the call asked for no credentials")
    base_url, token, scopes = delegation
    if not isinstance(scopes, tuple | list):
        raise refused(INVALID_DELEGATION, "the gateway's scopes are not a tuple of texts")
    extra = [scope for scope in scopes if scope not in asked.scopes]
    if extra:
        message = f"the gateway gave the scope {quoted(str(extra[0]))}, which was not asked for"
        raise refused(INVALID_DELEGATION, f"{message}: a Gateway may give only the scopes of its request")
    if not scopes:
        return prepared._replace(delegation=None)
    gateway = make_api_gateway(base_url, token, scopes)
    body = prepared.call.input
    body = {**body, "context": {**body["context"], "gateway": gateway}}
    return Prepared(
        prepared.call._replace(input=body),
        {**prepared.options, "gateway_url": base_url},
        prepared.contents,
        Secrets({**prepared.secrets, TOKEN: token}),
    )


# --- the export and its binding -----------------------------------------------------------------------------


def _find(plugin: Plugin, call: Call) -> DeclaredExport:
    declared = declared_by(plugin)
    export = declared.find(call.name)
    names = [each.id for each in declared.exports if call.kind in ("export", each.kind)]
    if export is None:
        hint = did_you_mean(call.name, names) or f"it exports {', '.join(names[:_SHOWN_NAMES]) or 'nothing'}"
        message = f"the package has no export {quoted(call.name)}"
        raise CallRefused(Violation("tool_not_exposed", message, "export", hint))
    if call.kind not in ("export", export.kind):
        message = f"the export {export.id} is a {export.kind}, and no {quoted(call.kind)}"
        hint = f"leave --kind out, or say --kind {export.kind}"
        raise CallRefused(Violation("tool_not_exposed", message, "export", hint))
    return export


def _bind(
    plugin: Plugin, export: DeclaredExport, ids: Mapping[str, Any], options: Mapping[str, str]
) -> Binding | None:
    text, file = options.get("binding"), options.get("binding_file", "")
    if text is None:
        return None
    context = {**ids, "export_id": export.id}
    binding, found = read_binding(text, file, plugin, files=True, context=context)
    if binding is None:
        raise _binding_refused([fault for fault in found if fault.severity == "error"])
    return binding


def _binding_refused(errors: list[Diagnostic]) -> CallRefused:
    worst = next((fault for fault in errors if fault.rule in _CODES), errors[0])
    data = {"faults": [explained(fault) for fault in errors]}
    return refused(_CODES.get(worst.rule, INVALID_BINDING), explained(worst), data)


def _configure(
    plugin: Plugin, export: DeclaredExport, binding: Binding | None, config: Any
) -> Mapping[str, Any] | None:
    """The configuration to send, or None."""
    if binding is not None:
        if config is not None:
            message = "a binding was given, and it has the configuration: leave --config out"
            raise refused(INVALID_BINDING, message)
        completed: Mapping[str, Any] = binding.config
    else:
        if not isinstance(config, dict | None):
            raise refused(INVALID_BINDING, "the configuration is not an object: correct --config")
        try:
            encode(config)
        except ValueError as error:
            raise refused(INVALID_BINDING, f"the configuration is {error}: correct --config") from None
        completed, faults = complete_config(plugin, export, config or {})
        if faults:
            message = f"the configuration of {export.id} cannot be used: {'; '.join(faults[:_SHOWN_FAULTS])}"
            raise refused(INVALID_BINDING, f"{message}: correct --config", {"faults": list(faults)})
    return completed if completed or export.config_schema else None


def _check_secrets(
    plugin: Plugin, export: DeclaredExport, binding: Binding | None, secrets: Mapping[str, str]
) -> None:
    """`export`: as declared."""
    known = {slot for each in declared_by(plugin).exports for slot in each.permissions.slots}
    for name in secrets:
        if name != TOKEN and name not in known:
            hint = did_you_mean(name, known) or f"it has {', '.join(sorted(known)[:_SHOWN_NAMES]) or 'none'}"
            message = f"no export of the package has a secret slot {quoted(name)}: {hint}"
            raise refused(INVALID_BINDING, f"{message}; correct --secret")
    for slot in export.permissions.slots:
        if binding is not None and binding.slots.get(slot) is None:
            if slot in secrets:
                message = f"the binding leaves the secret slot {slot} empty (null), and --secret fills it"
                raise refused(INVALID_BINDING, f"{message}: change one of them")
        elif not secrets.get(slot):
            fact = "has an empty value" if slot in secrets else "has no value"
            message = f"the secret slot {slot} of {export.id} {fact}"
            raise refused(SECRET_MISSING, f"{message}: give --secret {slot}=@FILE or {slot}=env:NAME")


# --- time, credentials, schemas -----------------------------------------------------------------------------


def _timeout(export: DeclaredExport, seconds: float | None) -> float:
    """The lowest: the caller's, and the export's as its binding narrows it."""
    if seconds is None:
        return export.timeout
    if math.isnan(seconds) or seconds <= 0:
        raise refused(invalid_input(export.kind), "the time limit is not above 0: correct --timeout")
    return min(seconds, export.timeout)


def _api_gateway_url(export: DeclaredExport, options: Mapping[str, str], secrets: Mapping[str, str]) -> str:
    """The base_url of the gateway whose token was given; empty: none was."""
    url = options.get("gateway_url") or ""
    if not export.permissions.scopes and (url or TOKEN in secrets):
        message = f"{export.id} has no gateway_api_scopes, by its manifest or its binding"
        hint = "it gets no gateway: leave --gateway-url and --gateway-token out"
        raise refused(INVALID_DELEGATION, f"{message}, so {hint}")
    if bool(url) != (TOKEN in secrets):
        message = "--gateway-url and --gateway-token belong together: give both or none"
        raise refused(INVALID_DELEGATION, message)
    return url


def _load(plugin: Plugin, name: str) -> PackageSchema | None:
    if not name:
        return None
    try:
        return load_of(plugin, name)
    except DocumentError as error:
        raise refused(INVALID_SCHEMA, explained(error.diagnostics[0])) from None
