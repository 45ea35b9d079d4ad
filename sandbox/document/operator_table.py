"""What the models of an operator's files are made of: the policy, and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field

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
