"""Untrusted JSON Schemas: checked offline, and only at a cost that is known in advance.

Based on jsonschema-rs, which is fast and whose regular expressions take linear time, but which trusts its
schemas. schema_cost.py counts the steps of a check before it begins. References stay inside the document;
nothing is ever fetched.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from runner.protocol.schema_cost import (
    MOST_NODES,
    MOST_STEPS,
    MOST_TEXT,
    SchemaFault,
    SchemaGraph,
    mapped,
    measure,
    shown,
    walk,
)
from sandbox.document.diagnostic import nearest, quoted

MOST_FAULTS = 10
MOST_PATTERNS = 256
MOST_PATTERN_TEXT = 32 * 1024  # characters of all of them together
MOST_CLASSES = 500  # \w, \p{…} and their like in them: half a thousand characters each, 0.3 ms to compile
MOST_PATTERN_SIZE = 64 * 1024  # bytes of a compiled regular expression: at most 8 µs for each character
MOST_COPIED = 100_000_000  # bytes, when all faults are requested: each fault has a copy of its value

# Bytes that a schema takes when it is compiled, for each value, character and regular expression in it.
NODE_BYTES, CHARACTER_BYTES, PATTERN_BYTES = 2048, 4, 40 << 10

_DRAFTS = {
    "draft-04": "Draft4Validator",
    "draft-06": "Draft6Validator",
    "draft-07": "Draft7Validator",
    "2019-09": "Draft201909Validator",
}

_CLASSES = tuple("\\" + letter for letter in "wWpPbBdDsS")

_MOST_NAMED = 10  # keys or values, in one message
_MOST_COMPARED, _LONGEST_COMPARED = 200, 64  # keys of a schema with which one that it lacks is compared

# As messages about manifests name them.
_TYPES = {
    "array": "an array",
    "boolean": "a boolean",
    "integer": "an integer",
    "null": "null",
    "number": "a number",
    "object": "an object",
    "string": "a string",
}
_FAULTS = {
    "additionalItems": "it has more items than its schema allows",
    "contains": "too few or too many of its items fit the schema in 'contains'",
    "falseSchema": "nothing is allowed here",
    "not": "it must not fit the schema in 'not'",
    "unevaluatedItems": "it has more items than its schema allows",
    "uniqueItems": "the same item is in it twice",
}

_T = TypeVar("_T")


class Schema:
    """A compiled schema. The draft is 2020-12 unless `$schema` names an older one.

    `unchecked`: regular expressions that do not take linear time (look-around, back references) and are left
    out. Libraries write them for every e-mail address, so refusing them would refuse honest schemas.
    """

    def __init__(self, document: Any) -> None:
        """Raises SchemaFault."""
        measured = measure(document, MOST_NODES, MOST_TEXT, "the schema")
        patterns, self._data = _contents(document)
        # Bytes of memory it takes, for callers that hold several.
        self.size = (
            NODE_BYTES * measured.nodes + CHARACTER_BYTES * measured.text + PATTERN_BYTES * len(patterns)
        )
        if len(patterns) > MOST_PATTERNS:
            raise SchemaFault(
                f"the schema has {len(patterns)} regular expressions; {MOST_PATTERNS} are allowed"
            )
        text = "".join(patterns)
        if len(text) > MOST_PATTERN_TEXT or sum(map(text.count, _CLASSES)) > MOST_CLASSES:
            raise SchemaFault(
                "the schema has too long regular expressions, or too many classes like \\w in them"
            )
        keyword = "id" if _draft(document) == "Draft4Validator" else "$id"
        self._graph = SchemaGraph(document, id_keyword=keyword)
        self.unchecked, document = self._graph.without_patterns(lambda pattern: not _is_linear(pattern))
        self._document = document
        self._validator = _run_guarded(lambda: _compile(document))

    def faults(self, value: Any) -> tuple[str, ...]:
        """The faults of a value: a sentence with a JSON pointer each, at most MOST_FAULTS. Empty: it fits."""
        try:
            size = measure(value, MOST_STEPS, MOST_STEPS * 10, "the value")
            applied = self._graph.applied(value)
            if _run_guarded(lambda: self._validator.is_valid(value)):
                return ()
            if applied * (size.bytes + self._data) > MOST_COPIED:
                return ("(the value): it does not fit its schema; it is too large to say where",)
            found = _run_guarded(lambda: list(self._validator.iter_errors(value)))
        except SchemaFault as fault:
            return (f"(the value): it cannot be checked: {fault}",)
        return tuple(_sentence(fault, self._document) for fault in found[:MOST_FAULTS])


def _compile(document: Any) -> Any:
    import jsonschema_rs

    return getattr(jsonschema_rs, _draft(document))(
        document,
        validate_formats=False,  # only an annotation in 2020-12
        retriever=_refuse_to_fetch,
        pattern_options=jsonschema_rs.RegexOptions(size_limit=MOST_PATTERN_SIZE),
        mask="it",  # faults do not repeat the value: it may be long, or a secret
    )


def _draft(document: Any) -> str:
    wanted = document.get("$schema") if isinstance(document, dict) else None
    known = (name for mark, name in _DRAFTS.items() if isinstance(wanted, str) and mark in wanted)
    return next(known, "Draft202012Validator")


def _is_linear(pattern: str) -> bool:
    try:
        _run_guarded(lambda: _compile({"pattern": pattern}))
    except SchemaFault:
        return False
    return True


def _refuse_to_fetch(uri: str) -> Any:
    raise ValueError("references lead nowhere outside of the schema")


def _run_guarded(act: Callable[[], _T]) -> _T:
    try:
        return act()
    except ValueError as error:
        raise SchemaFault(
            _sentence(error) if hasattr(error, "instance_path") else shown(str(error))
        ) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a Rust panic: no Exception, and it cannot be imported
            raise
        raise SchemaFault("the validator has failed") from None


def _contents(document: Any) -> tuple[list[str], int]:
    """All regular expressions in it, and the most bytes that a fault may copy."""
    patterns: list[str] = []
    data = 256
    for value in walk(document):
        if not isinstance(value, dict):
            continue
        if isinstance(value.get("pattern"), str):
            patterns.append(value["pattern"])
        patterns += mapped(value.get("patternProperties"))
        for key in ("enum", "const", "not"):
            if key in value:
                inside = list(walk(value[key]))
                data = max(
                    data, 64 * len(inside) + sum(len(text) for text in inside if isinstance(text, str))
                )
    return patterns, data


def _sentence(fault: Any, document: Any = None) -> str:
    path = "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in fault.instance_path)
    return f"{shown(path) or '(the value)'}: {_plain_words(fault, document) or shown(fault.message)}"


def _plain_words(fault: Any, document: Any) -> str:
    """What is wrong, for faults that the validator tells in words of JSON Schema; else ''."""
    kind = fault.kind
    match getattr(kind, "name", ""):
        case "type":
            return f"it has to be {' or '.join(_TYPES[each] for each in kind.types)}"
        case "const":
            return f"it has to be {_listed([kind.expected_value])}"
        case "enum":
            return f"it has to be one of {_listed(kind.options)}"
        case "required":
            return f"the key {quoted(str(kind.property))} is missing"
        case "propertyNames":
            return f"the key {shown(fault.message)}"
        case "minProperties" | "maxProperties" as keyword:
            keys = "key" if kind.limit == 1 else "keys"
            return f"it has {'less' if keyword == 'minProperties' else 'more'} than {kind.limit} {keys}"
        case "additionalProperties" | "unevaluatedProperties":
            unknown = [str(key) for key in kind.unexpected]
            names = ", ".join(map(quoted, unknown[:_MOST_NAMED]))
            names += ", …" if len(unknown) > _MOST_NAMED else ""
            told = f"the key {names} is unknown here" if len(unknown) == 1 else f"unknown keys: {names}"
            known = _known_keys(document, list(fault.schema_path)[:-1])
            meant = [near for key in unknown[:_MOST_NAMED] if (near := nearest(key, known))]
            return f"{told}; did you mean {', '.join(map(quoted, meant))}?" if meant else told
        case "oneOf" | "anyOf" as keyword:
            if type(kind).__name__.endswith("MultipleValid"):
                return f"it fits more than one of the schemas in '{keyword}'"
            return _no_alternative(fault, keyword)
        case name:
            return _FAULTS.get(name, "")


def _no_alternative(fault: Any, keyword: str) -> str:
    """What to say of a value that fits none of several schemas: what each of them says of it, if that is one
    thing about the value itself."""
    context, place = fault.kind.context, list(fault.instance_path)
    found = [each[0] for each in context if len(each) == 1 and list(each[0].instance_path) == place]
    if len(found) != len(context) or any(each.kind.name in ("anyOf", "oneOf") for each in found):
        return f"it fits none of the schemas in '{keyword}'"
    if all(each.kind.name == "type" for each in found):
        types = dict.fromkeys(_TYPES[name] for each in found for name in each.kind.types)
        return f"it has to be {' or '.join(types)}"
    told = [_plain_words(each, None) or each.message for each in found]
    return shown(f"it fits none of the schemas in '{keyword}': {'; or '.join(told)}")


def _listed(values: list[Any]) -> str:
    """The first values, as JSON."""
    named = [shown(json.dumps(value, ensure_ascii=False)) for value in values[:_MOST_NAMED]]
    return ", ".join([*named, "…"] if len(values) > _MOST_NAMED else named)


def _known_keys(document: Any, path: list[Any]) -> list[str]:
    """The keys that the schema at this path has for an object."""
    for step in path:
        if isinstance(document, dict):
            document = document.get(step)
        elif isinstance(document, list) and isinstance(step, int) and step < len(document):
            document = document[step]
        else:
            return []
    known = document.get("properties") if isinstance(document, dict) else None
    keys = list(known)[:_MOST_COMPARED] if isinstance(known, dict) else []
    return [key for key in keys if len(key) <= _LONGEST_COMPARED]
