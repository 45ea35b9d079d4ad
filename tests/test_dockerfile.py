"""Checks of the Dockerfile and of the container's seccomp filter that need no container engine.

scripts/test-container runs plugins in the image.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import runner
from sandbox.identity import state
from sandbox.policy.parse import parse_policy
from sandbox.policy.policy import SYSTEM_POLICY
from sandbox.seccomp import filter as seccomp_filter
from sandbox.seccomp import syscalls
from scripts.container import filter as container_filter
from scripts.container.image import BuildError, Stage, copied, packages, read_dockerfile
from scripts.releasing.lock import read_lock
from tests.conftest import ROOT

STAGES = read_dockerfile((ROOT / "Dockerfile").read_text())
IMAGE = STAGES[-1]


def steps(word: str, stage: Stage = IMAGE) -> list[str]:
    return [step.rest for step in stage.instructions if step.word == word]


def test_the_container_test_knows_every_instruction() -> None:
    known = {"RUN", "COPY", "WORKDIR", "ENV", "USER", "ENTRYPOINT", "CMD", "LABEL"}
    assert {step.word for stage in STAGES for step in stage.instructions} <= known
    with pytest.raises(BuildError, match="FROM alpine"):
        read_dockerfile("FROM alpine\n")


def test_copied_files_exist_and_have_explicit_modes() -> None:
    """A checkout made with umask 002 has group-writable files, and the runner refuses such a policy."""
    for stage in STAGES:
        for step in stage.instructions:
            if step.word != "COPY" or "from" in step.flags:
                continue
            *sources, target = step.words
            assert all((ROOT / source).exists() for source in sources), step
            if target.startswith("/"):
                assert step.flags.get("chmod") == "0644", step
    assert SYSTEM_POLICY in [step.words[-1] for step in IMAGE.instructions if "chmod" in step.flags]


def test_the_image_gets_every_file_that_an_installation_needs() -> None:
    """What is copied is enough to build the wheel, and .dockerignore lets exactly that through."""
    sources = copied(STAGES)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    setup = project["tool"]["setuptools"]
    patterns = [pattern for each in setup["data-files"].values() for pattern in each]
    named = [
        *(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)),
        *setup["script-files"],
        *(package.rstrip(".*") for package in setup["packages"]["find"]["include"]),
        *(project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml"),
    ]
    folders = [source for source in sources if (ROOT / source).is_dir()]
    lacking = {name for name in named if name not in sources and not name.startswith(tuple(folders))}
    assert lacking == set()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert [line for line in ignored if line and line[0] not in "#!"] == [
        "*",
        "**/__pycache__",
        "**/*.py[cod]",
    ]
    shown = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    inside = [source for source in sources if source not in shown]  # of a folder that is shown
    assert set(shown) <= set(sources)
    assert all(source.startswith(tuple(f"{name}/" for name in shown)) for source in inside)


def test_the_image_is_built_from_pinned_and_hashed_packages() -> None:
    pinned = {pin.name: pin.version for pin in read_lock()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    own = project["project"]
    extras = [each for name, extra in own["optional-dependencies"].items() if name != "dev" for each in extra]
    wanted = [*own["dependencies"], *extras, *project["build-system"]["requires"]]
    for requirement in map(Requirement, wanted):
        if requirement.name != own["name"]:
            assert requirement.specifier.contains(pinned[requirement.name]), requirement
    # Whatever these need is there too, as far as it is installed here in the pinned version.
    for name, version in pinned.items():
        found = next((each for each in distributions(name=name) if each.version == version), None)
        for requirement in map(Requirement, (found.requires or ()) if found else ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), (
                    requirement
                )
    installs = [
        word for step in steps("RUN", STAGES[0]) for word in step.split("&&") if "pip install" in word
    ]
    # The last installs the runner itself, and nothing else.
    assert ["--require-hashes" in each for each in installs] == [True, True, False]
    assert ["--no-deps --no-build-isolation ." in each for each in installs] == [False, False, True]


def test_the_image_says_what_it_is() -> None:
    [labels] = steps("LABEL")
    found = dict(word.split("=", 1) for word in shlex.split(labels))
    name = "org.opencontainers.image."
    assert found[f"{name}version"] == runner.__version__
    assert found[f"{name}licenses"] == "Apache-2.0"
    page = found[f"{name}documentation"].removeprefix("/opt/runner/share/doc/plugin-runner/")
    assert (ROOT / page).is_file()
    assert {stage.suite for stage in STAGES} == {"trixie"}  # bubblewrap 0.11 or later, Python 3.13
    assert found[f"{name}base.name"] == "docker.io/library/debian:trixie-slim"


def test_the_image_has_few_packages_and_does_not_run_as_root() -> None:
    assert packages(IMAGE) == ("bubblewrap", "libcap2", "python3")
    assert steps("USER") == ["1000:1000"]
    assert steps("ENTRYPOINT") == ['["runner"]']
    # USER comes after the last RUN: the build needs root, the image does not.
    order = [step.word for step in IMAGE.instructions]
    assert order.index("USER") > max(number for number, word in enumerate(order) if word == "RUN")
    assert "useradd --uid 1000" in " ".join(steps("RUN"))


def test_one_volume_holds_the_state_of_root_and_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = dict(word.split("=", 1) for step in steps("ENV") for word in step.split())
    roots = []
    for uid in (0, 1000):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        roots.append(state.state_root({**environ, "HOME": "/home/runner"}))
    assert roots == ["/var/lib/runner/plugins"] * 2
    assert "install -d -o 1000 -g 1000 -m 0711 /var/lib/runner" in " ".join(steps("RUN"))


def test_the_images_policy_differs_from_the_default_only_in_the_mode_of_limits() -> None:
    [change] = re.findall(r"sed -i '([^']+)' (\S+)", " ".join(steps("RUN")))
    assert change[1] == SYSTEM_POLICY
    before = (ROOT / "policies/default.toml").read_bytes()
    after = subprocess.run(["sed", change[0]], input=before, capture_output=True, check=True).stdout
    old, new = (parse_policy("/p", raw, name="p") for raw in (before, after))
    assert [(name, rule.mode) for name, rule in old.limits if rule.mode == "delegated"] != []
    softened = tuple(
        (name, rule._replace(mode="prefer") if rule.mode == "delegated" else rule)
        for name, rule in old.limits
    )
    assert new == old._replace(limits=softened)


def test_the_command_in_the_dockerfile_names_the_shipped_filter() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert f"seccomp={container_filter.OUTPUT.relative_to(ROOT)}" in text
    assert "docs/containers.md" in text and (ROOT / "docs/containers.md").exists()


# --- the filter ---------------------------------------------------------------------------------------------

FILTER = json.loads(container_filter.OUTPUT.read_text())


def allowed(document: dict[str, object] = FILTER) -> Iterator[str]:
    entries = document["syscalls"]
    assert isinstance(entries, list)
    for entry in entries:
        if entry["action"] == "SCMP_ACT_ALLOW":
            yield from entry["names"]


def test_the_shipped_filter_is_what_the_script_writes() -> None:
    assert container_filter.OUTPUT.read_text() == container_filter.text(container_filter.profile()), (
        "run scripts/container-filter"
    )


def test_the_filter_has_only_fields_that_all_engines_read_alike() -> None:
    """containerd knows neither archMap nor includes, and would apply such entries unconditionally."""
    assert set(FILTER) == {"defaultAction", "defaultErrnoRet", "architectures", "syscalls"}
    for entry in FILTER["syscalls"]:
        assert set(entry) <= {"names", "action", "args", "errnoRet"}
    assert (FILTER["defaultAction"], FILTER["defaultErrnoRet"]) == ("SCMP_ACT_ERRNO", 1)


def test_the_filter_adds_exactly_seven_calls_to_dockers() -> None:
    plain = container_filter.profile(())
    assert set(allowed()) - set(allowed(plain)) == set(container_filter.ADDITIONS) - {"clone"}
    assert len(container_filter.ADDITIONS) == 7
    [clone] = [entry for entry in plain["syscalls"] if entry["names"] == ["clone"]]
    assert clone["args"] == [{"index": 0, "value": 0x7E020000, "op": "SCMP_CMP_MASKED_EQ", "valueTwo": 0}]
    [keyctl] = [entry for entry in FILTER["syscalls"] if entry["names"] == ["keyctl"]]
    assert keyctl["args"] == [{"index": 0, "value": 1, "op": "SCMP_CMP_EQ"}]


def test_calls_that_reach_the_host_stay_refused() -> None:
    """The calls that Docker's documentation lists as blocked to protect the host, except the seven."""
    blocked = {
        *("acct", "add_key", "bpf", "clock_settime", "create_module", "delete_module", "finit_module"),
        *("get_kernel_syms", "init_module", "ioperm", "iopl", "kcmp", "kexec_file_load", "kexec_load"),
        *("lookup_dcookie", "mbind", "move_pages", "nfsservctl", "open_by_handle_at", "perf_event_open"),
        *("query_module", "quotactl", "reboot", "request_key", "setns", "settimeofday", "swapon", "swapoff"),
        *("sysfs", "_sysctl", "uselib", "userfaultfd", "ustat", "syslog", "vhangup", "setdomainname"),
        *("io_uring_setup", "io_uring_enter", "io_uring_register", "pidfd_getfd", "fanotify_init"),
        *("open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr"),
    }
    assert blocked & set(allowed()) == set()


@pytest.mark.parametrize("name", seccomp_filter.PROFILES)
def test_the_filter_allows_every_call_that_a_plugin_may_make(name: str) -> None:
    profile = tomllib.loads((ROOT / f"policies/seccomp/{name}.toml").read_text())
    wanted = {call for group in profile.get("allow", {}).values() for call in group}
    wanted |= set(profile.get("rules", {}))
    # The profile "compat" also allows a call that Docker refuses. Its programs fall back in a container.
    refused = {"clone3"} if name == "compat" else set()
    assert wanted - set(allowed()) == refused


def test_the_filter_names_existing_calls() -> None:
    known = {name for arch in syscalls.ARCHES for name in syscalls.load(arch)}
    assert set(allowed()) <= known
    assert len(list(allowed())) - len(set(allowed())) == 4  # personality, once for each value


def test_the_image_carries_the_filter() -> None:
    source = str(container_filter.OUTPUT.relative_to(ROOT))
    [copied] = [step for step in IMAGE.instructions if step.word == "COPY" and source in step.words]
    from sandbox.doctor import user_namespaces

    assert copied.words[-1] in user_namespaces.container_remedy("docker")
    assert source == user_namespaces.FILTER


def test_the_container_test_says_what_it_needs(tmp_path: Path) -> None:
    """Without its tools the script exits with 77 and names the packages to install."""
    for name in ("python3", "dirname", "sh"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    argv = ["/bin/sh", str(ROOT / "scripts/test-container")]
    done = subprocess.run(argv, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 77, done.stderr
    assert "mmdebstrap" in done.stderr and "apt-get install mmdebstrap runc" in done.stderr
