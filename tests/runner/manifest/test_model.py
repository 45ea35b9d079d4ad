from __future__ import annotations

import subprocess
import sys
import sysconfig

import pytest

from tests.conftest import ROOT

PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:3]
from pydantic import BaseModel
if sys.argv[3] == "models before":
    class Own(BaseModel):
        name: str
loaded = sys.modules.get("pydantic.plugin._loader")
from sandbox.document.faults import Faults
from sandbox.document.model import TABLE, check
from sandbox.document.read import parse

class Table(BaseModel):
    model_config = TABLE
    name: str

faults = Faults(parse("x.toml", b"name = 1\\n", "toml"))
check(faults, Table, {"name": 1}, (), lambda keys: None)
print(*(fault.rule for fault in faults.diagnostics()))
print("importlib.metadata" in sys.modules, sys.modules.get("pydantic.plugin._loader") is loaded)

class Later(BaseModel):
    name: str

print("importlib.metadata" in sys.modules)
"""


@pytest.mark.parametrize(("models", "searched"), [("none before", False), ("models before", True)])
def test_no_plugin_of_pydantic_is_looked_for(models: str, searched: bool) -> None:
    """For a manifest. A program that has models itself has its plugins, before and after."""
    argv = [sys.executable, "-I", "-S", "-c", PROGRAM, str(ROOT), sysconfig.get_path("purelib"), models]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["invalid_type", f"{searched} True", "True"]
