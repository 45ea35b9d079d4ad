"""Requests and grants for tests, and a cage around them: compiled here, or run for real somewhere else."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sandbox.paths.denylist import Denylist
from sandbox.paths.mounts import read_mounts
from sandbox.plan.available_layers import available_layers
from sandbox.plan.compile import open_plan
from sandbox.plan.plan import LaunchPlan, OpenPlan, PlanRequest
from sandbox.policy.policy import Policy
from sandbox.spec import Access, Grant, GrantedPath, Limits, Network, NetworkMode, SeccompProfile
from tests import elsewhere
from tests.conftest import SYSTEM_PATH, Caller

ENVIRON = {"PATH": SYSTEM_PATH}


def policy(**changes: Any) -> Policy:
    return Policy(name="test", file="/nonexistent/policy.toml", **changes)


def request(command: str, *args: str, directory: str = "/", **changes: Any) -> PlanRequest:
    return PlanRequest(
        **{
            "command": command,
            "args": args,
            "directory": directory,
            "root": None if directory == "/" else directory,
            "bare_environment": False,
            "trusted_command": False,
            "conceal": (),
            "state_dir": None,
            **changes,
        }
    )


def granted(path: str, access: Access = "read", *, required: bool = True) -> GrantedPath:
    return GrantedPath(path, access, required, "manifest", ("paths", path))


def grant(
    paths: Sequence[GrantedPath] = (),
    *,
    network: NetworkMode = "none",
    env: Mapping[str, str] | None = None,
    seccomp: SeccompProfile = "default",
    limits: Limits | None = None,
) -> Grant:
    return Grant(
        policy="test",
        unsandboxed=False,
        paths=tuple(paths),
        network=Network(network),
        env=tuple((env or {}).items()),
        seccomp=seccomp,
        limits=limits or Limits(),
        decided_by=(),
        denials=(),
    )


@contextmanager
def opened(
    asked: PlanRequest,
    given: Grant | None = None,
    *,
    rules: Policy | None = None,
    deny: Sequence[str] = (),
    deciding: Sequence[str] = (),
    environ: Mapping[str, str] = ENVIRON,
) -> Iterator[OpenPlan]:
    denylist = Denylist(read_mounts(), policy=deny, deciding=deciding)
    given, rules = given or grant(), rules or policy()
    layers = available_layers(given, rules, "/usr/bin/bwrap", can_join_keyring=True)
    with open_plan(asked, given, rules, layers, denylist, environ) as plan:
        yield plan


def compiled(asked: PlanRequest, given: Grant | None = None, **more: Any) -> LaunchPlan:
    with opened(asked, given, **more) as held:
        return held.plan


# --- for real ----------------------------------------------------------------------------------------------


def cage(given: dict[str, Any]) -> Iterator[Any]:
    """Launch a request; wrapped with contextmanager() where it runs. Nothing is leased, but as root it
    drops to a uid of the range. With "bare" it has no cage."""
    import os
    import shutil

    from sandbox.cell.contents import Contents
    from sandbox.cell.launch import launch
    from sandbox.cell.unsandboxed import start_unsandboxed
    from sandbox.identity.owner import Owner
    from sandbox.paths.denylist import Denylist
    from sandbox.paths.mounts import read_mounts
    from sandbox.plan.available_layers import available_layers
    from sandbox.plan.compile import open_plan
    from sandbox.plan.plan import PlanRequest
    from sandbox.policy.policy import Policy
    from sandbox.spec import Grant, GrantedPath, Limits, MemoryFile, Network, Scratch

    asked: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in given["request"].items()
    }
    grant = Grant(
        policy="test",
        unsandboxed=given["bare"],
        paths=tuple(GrantedPath(path, access, True, "manifest", ()) for path, access in given["paths"]),
        network=Network(given["network"], tuple(given["hosts"])),
        env=tuple(given["env"].items()),
        seccomp=given["seccomp"],
        limits=Limits(**given.get("limits", {})),
        decided_by=(),
        denials=(),
        scratch=Scratch(given["scratch"]) if given.get("scratch") else None,
        memory_files=tuple(MemoryFile(*file) for file in given.get("memory_files", ())),
        ssh=tuple(given.get("ssh", ())),
    )
    contents = Contents(
        *({name: os.fsencode(text) for name, text in part.items()} for part in given.get("contents", ()))
    )
    # As conftest.SPARE_UID, which is out of reach where this runs.
    own = 2_100_000_026 + os.getpid() % 1_000_000 * 32 if os.geteuid() == 0 else os.geteuid()
    owner = Owner(own, own, given.get("lease"))
    policy = Policy(name="test", file="/nonexistent/policy.toml", layers=(("session_keyring", "prefer"),))
    bwrap = shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin")
    assert bwrap is not None
    layers = available_layers(grant, policy, bwrap, can_join_keyring=False)
    environ = {"PATH": given["search_path"], "HOME": os.environ["HOME"]}
    with (
        open_plan(PlanRequest(**asked), grant, policy, layers, Denylist(read_mounts()), environ) as plan,
        start_unsandboxed(plan.plan) if given["bare"] else launch(plan, owner, bwrap, None, contents) as cell,
    ):
        yield cell


def caged(given: dict[str, Any]) -> dict[str, Any]:
    """Launch a request and wait for its end. Returns how it ended and its output."""
    import os
    from contextlib import contextmanager

    said = os.memfd_create("said")
    saved = os.dup(1), os.dup(2)
    os.dup2(said, 1)
    os.dup2(said, 2)
    try:
        with contextmanager(cage)(given) as cell:
            end = cell.wait()
    finally:
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
    os.lseek(said, 0, os.SEEK_SET)
    with open(said, encoding="utf-8", errors="surrogateescape") as file:
        output = file.read()
    return {
        "code": end.code,
        "reached_exec": end.reached_exec,
        "signal": end.signal,
        "output": output,
        "usage": end.usage._asdict(),
    }


def order(
    asked: PlanRequest,
    *,
    paths: Sequence[tuple[str, Access]] = (),
    env: Mapping[str, str] | None = None,
    search_path: str = SYSTEM_PATH,
    bare: bool = False,
    network: NetworkMode = "none",
    hosts: Sequence[str] = (),
    seccomp: SeccompProfile = "default",
    **more: Any,
) -> dict[str, Any]:
    """The input of `cage`, as JSON. `more`: limits, scratch, memory_files, contents, ssh."""
    return {
        **more,
        "request": asked._asdict(),
        "paths": list(paths),
        "env": dict(env or {}),
        "search_path": search_path,
        "bare": bare,
        "network": network,
        "hosts": list(hosts),
        "seccomp": seccomp,
    }


def run(caller: Caller, asked: PlanRequest, **more: Any) -> dict[str, Any]:
    """`asked` in a real cage, as `caller`: code, reached_exec, signal, output (stdout and stderr), usage."""
    result: dict[str, Any] = elsewhere.run(caller, caged, order(asked, **more), using=(cage,))
    return result


def open_descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))
