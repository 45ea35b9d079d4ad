"""The routes of packages, bindings and discovery as one table, with the schemas of their documents."""

from __future__ import annotations

from typing import Any

from runner.serve.control.database import STATES
from runner.serve.control.discovery import KINDS
from runner.serve.control.packages import FILTERS, REVIEWS
from runner.serve.openapi import Operation, Parameter, Schema, list_of, object_of

PACKAGES, BINDINGS = "/v1/plugin-packages", "/v1/plugin-bindings"
_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_INTEGER: Schema = {"type": "integer"}
_MOST = Parameter("most", "query", "how many, 100 if it is missing, 1000 at most", _INTEGER)
_AFTER = Parameter("after", "query", "`next` of the list before")
_BEFORE = Parameter("before", "query", "a revision: only earlier ones", _INTEGER)
_IF_MATCH = Parameter("If-Match", "header", "the ETag of what is changed; 428 without it, 412 if it is old")
_ORG = Parameter("org_id", "query", "only of this org")
_PROJECT = Parameter("project_id", "query", "in this project, whose bindings go before those of its org")

_FOR_ORGS: dict[str, Any] = {"control": "org"}
_FOR_OPERATOR: dict[str, Any] = {"control": "operator"}

# A row for each route.
# fmt: off
_OF_PACKAGES = (
    Operation("import_package", "POST", PACKAGES, "Import a package, or make a contract-ready entry.",
              "Package", status=201, body="Import", **_FOR_OPERATOR),
    Operation("packages", "GET", PACKAGES, "Packages and their states.", "Packages",
              parameters=(*(Parameter(each, "query", f"only with this {each}") for each in FILTERS),
                          _AFTER, _MOST),
              **_FOR_ORGS),
    Operation("package", "GET", f"{PACKAGES}/{{package}}", "One package.", "Package", **_FOR_ORGS),
    Operation("change_package", "PATCH", f"{PACKAGES}/{{package}}", "Review it, and say who may install it.",
              "Package", parameters=(_IF_MATCH,), body="PackageChange", **_FOR_OPERATOR),
    Operation("package_history", "GET", f"{PACKAGES}/{{package}}/history", "Its changes.", "History",
              parameters=(_BEFORE, _MOST), **_FOR_OPERATOR),
    Operation("install", "POST", f"{PACKAGES}/{{package}}:install", "Bind one of its exports.", "Binding",
              status=201, body="Install", **_FOR_ORGS),
    Operation("withdraw", "POST", f"{PACKAGES}/{{package}}:withdraw", "Stop new calls of its bindings.",
              "Package", **_FOR_OPERATOR),
    Operation("restore", "POST", f"{PACKAGES}/{{package}}:restore", "End its withdrawal.", "Package",
              **_FOR_OPERATOR),
)
_OF_BINDINGS = (
    Operation("create_binding", "POST", BINDINGS, "Bind an export to an org or a project.", "Binding",
              status=201, body="BindingRecord", **_FOR_ORGS),
    Operation("validate_draft", "POST", f"{BINDINGS}:validate", "The faults of a record that is not stored.",
              "Validation", body="BindingRecord", **_FOR_ORGS),
    Operation("bindings", "GET", BINDINGS, "Bindings.", "Bindings",
              parameters=(_ORG, Parameter("project_id", "query", "only of this project"),
                          Parameter("package", "query", "only for this package, by its id"),
                          Parameter("kind", "query", f"only of {', '.join(KINDS)}"), _AFTER, _MOST),
              **_FOR_ORGS),
    Operation("binding", "GET", f"{BINDINGS}/{{binding}}", "One binding.", "Binding", **_FOR_ORGS),
    Operation("change_binding", "PATCH", f"{BINDINGS}/{{binding}}", "Replace keys of it, or roll it back.",
              "Binding", parameters=(_IF_MATCH,), body="BindingChange", **_FOR_ORGS),
    Operation("validate_binding", "POST", f"{BINDINGS}/{{binding}}:validate",
              "Its faults, now or after a change.", "Validation", body="BindingChange", **_FOR_ORGS),
    Operation("binding_history", "GET", f"{BINDINGS}/{{binding}}/history", "Its versions.", "History",
              parameters=(_BEFORE, _MOST), **_FOR_ORGS),
)
# fmt: on
_OF_DISCOVERY = tuple(
    Operation(
        f"plugin_{kind}",
        "GET",
        f"/v1/plugin-{kind}",
        f"The {kind} that can be used now.",
        "Exports",
        parameters=(_ORG, _PROJECT, _AFTER, _MOST),
        **_FOR_ORGS,
    )
    for kind in KINDS
)
_SCOPE = object_of("org_id", org_id=_TEXT, project_id=_TEXT)
_CHANGE: dict[str, Schema] = {
    "package_version": _TEXT,
    "config": {"type": "object"},
    "secrets": {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
    "status": {"type": "string", "enum": ["active", "disabled"]},
    "rollout": object_of("", traffic_percent={"type": "integer", "minimum": 0, "maximum": 100}),
    "policy": {"type": "object"},
}
_RECORD: dict[str, Schema] = {**_CHANGE, "package_id": _TEXT, "export_id": _TEXT, "scope": _SCOPE}
_CHOSEN: dict[str, Schema] = {
    "publisher": _TEXT,
    "review": {"type": "string", "enum": list(REVIEWS)},
    "install_policy": {"type": "array", "items": _TEXT},
}
_KEPT = {"revision": _INTEGER, "created": _NUMBER, "changed": _NUMBER}

OPERATIONS = (*_OF_PACKAGES, *_OF_BINDINGS, *_OF_DISCOVERY)
SCHEMAS: dict[str, Schema] = {
    "Import": object_of("", source=_TEXT, package_id=_TEXT, version=_TEXT, name=_TEXT, **_CHOSEN),
    "PackageChange": object_of("", **_CHOSEN),
    "Package": object_of(
        "id package_id version state review",
        **dict.fromkeys(("id", "package_id", "version", "name", "description", "reason"), _TEXT),
        **dict.fromkeys(("source", "digest"), _TEXT),
        state={"type": "string", "enum": list(STATES)},
        signature=object_of("state key_id", state=_TEXT, key_id=_TEXT),
        **_CHOSEN,
        **_KEPT,
    ),
    "Packages": object_of("packages next", packages=list_of("Package"), next={"type": ["string", "null"]}),
    "BindingRecord": object_of("package_id package_version export_id scope status", **_RECORD),
    "Install": object_of("export_id scope", **_RECORD),
    "BindingChange": object_of("", revision=_INTEGER, **_CHANGE),
    "Binding": object_of(
        "binding_id package_id package_version export_id scope revision",
        binding_id=_TEXT,
        package=_TEXT,
        kind=_TEXT,
        inactive=_TEXT,
        **_RECORD,
        **_KEPT,
    ),
    "Bindings": object_of("bindings next", bindings=list_of("Binding"), next={"type": ["string", "null"]}),
    "Validation": object_of(
        "valid faults", valid={"type": "boolean"}, faults={"type": "array", "items": {"type": "object"}}
    ),
    "Revision": object_of(
        "revision at caller change document",
        **dict.fromkeys(("caller", "change"), _TEXT),
        revision=_INTEGER,
        at=_NUMBER,
        document={"type": "object"},
    ),
    "History": object_of("history", history=list_of("Revision")),
    "Exports": {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "object"}}},
}
