"""The places that no plugin may write hold every file of the table of hosts."""

from __future__ import annotations

from runner.contracts.mcp.hosts.places import (
    HOME_PLACES,
    PROJECT_NAMES,
    SYSTEM_PLACES,
    TOKEN_FILES,
    VARIABLES,
)
from runner.contracts.mcp.hosts.table import HOSTS
from sandbox.paths.mounts import contains
from tests.tables import one_case

FILES = sorted({(host.name, file) for host in HOSTS for file in host.files})


@one_case(("host", "file"), FILES)
def test_a_file_of_a_user_is_protected(host: str, file: str) -> None:
    base, _, rest = file.partition("/")
    if base != "~":
        assert base.removeprefix("$").rstrip("/") in VARIABLES, host
        return
    assert any(contains(f"/{place}", f"/{rest}") for place in HOME_PLACES), host
    if "*" not in rest:  # a hard link to it is found by its own name
        assert rest in HOME_PLACES, host


def test_files_of_projects_and_of_the_system_are_protected() -> None:
    names = {each.name for each in PROJECT_NAMES}
    for host in HOSTS:
        assert {file.partition("/")[0] for file in host.project_files} <= names, host.name
        for file in host.system_files:
            assert any(contains(place, file) for place in SYSTEM_PLACES), (host.name, file)


def test_hosts_that_are_not_in_the_table_are_protected() -> None:
    """Where a project's file is guarded, the user's is protected too, and its tokens are not shown."""
    assert {".qwen", ".config/crush", ".local/share/crush"} <= {*HOME_PLACES}
    tokens = {".qwen/settings.json", ".config/crush/crush.json", ".local/share/amp/secrets.json"}
    assert tokens <= {*TOKEN_FILES}
