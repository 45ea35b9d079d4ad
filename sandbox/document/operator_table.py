"""What the models of an operator's files are made of: the policy, and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field
from pydantic_core.core_schema import CoreSchema, no_info_plain_validator_function

from sandbox.document.diagnostic import DocumentError
from sandbox.document.faults import Faults
from sandbox.document.model import TABLE, Wording, check
from sandbox.document.read import Document

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]  # a list is no tuple otherwise

# What types are called in messages to operators.
EXPECTED: Mapping[str, str] = {
    "string_type": "a text",
    "int_type": "a whole number",
    "tuple_type": "a list of texts",
    "list_type": "a list of texts",
    "dict_type": "a table",
}


class OperatorTable(BaseModel):
    """A table that an operator wrote. An unknown key is a fault: it may be a rule that does not hold."""

    model_config = TABLE


def read_table(
    document: Document, faults: Faults, model: Any, wording: Wording, unknown: str, context: object = None
) -> Any:
    """The model of a file. Raises DocumentError with every fault. `unknown`: the rule of unknown keys."""
    found = check(faults, model, document.data, (), lambda *_: unknown, wording, context)
    if faults.failed:
        raise DocumentError(*faults.diagnostics())
    return found


class Kind:
    """A kind of value, as metadata of Annotated: the function that reads one, and its JSON Schema."""

    def __init__(self, read: Callable[[Any], Any], schema: dict[str, Any]) -> None:
        """`read` returns the value that the model has, or raises ValueError."""
        self._read, self._schema = read, schema

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return no_info_plain_validator_function(self._read)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return dict(self._schema)  # pydantic adds the description to it


def table_schema(model: Any) -> dict[str, Any]:
    """The JSON Schema of a model, with that of each table where it stands."""
    schema: dict[str, Any] = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def plain(each: dict[str, Any]) -> dict[str, Any]:
        if "$ref" in each:
            each = {**definitions[each["$ref"].rpartition("/")[2]], **each}
        each = {key: value for key, value in each.items() if key not in ("$ref", "title", "default")}
        if "properties" in each:
            each["properties"] = {key: plain(value) for key, value in each["properties"].items()}
        if isinstance(each.get("additionalProperties"), dict):  # tables by name
            each["additionalProperties"] = plain(each["additionalProperties"])
        return each

    return plain(schema)
