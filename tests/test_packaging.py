"""The wheel has the whole program with its data, and works when installed."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import runner
from runner.build import build_version
from runner.cli import all_verbs
from runner.contracts.registry import contract_names, example_folder
from scripts.releasing import distributions as distributions_of_release
from scripts.releasing.distributions import NotReleasable, build_twice
from tests.conftest import PACKAGES, ROOT

# Files that tools leave in the tree: neither code nor data of the program.
_NOT_OURS = {"__pycache__"}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Wheel and sdist, built twice from copies in other folders and with other times of the files, and the
    wheel once more from the sdist. It fails if any two are not the same bit for bit."""
    wheel, sdist = build_twice(tmp_path_factory.mktemp("dist"), 1_700_000_000)
    return wheel, sdist


@pytest.fixture(scope="module")
def wheel(distributions: tuple[Path, Path]) -> Path:
    return distributions[0]


def test_builds_that_differ_are_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The control of the fixture: builds whose files depend on the folder."""

    def build(sources: Path, out: Path, *_: object) -> None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "x.whl").write_text(str(sources))
        with tarfile.open(out / "x.tar.gz", "w:gz") as packed:
            packed.add(sources / "LICENSE", "x/LICENSE")

    monkeypatch.setattr(distributions_of_release, "build", build)
    monkeypatch.setattr(distributions_of_release, "write_man_pages", lambda *_: None)
    with pytest.raises(NotReleasable, match="differs between two builds"):
        build_twice(tmp_path, 0)


def test_the_sdist_has_no_trace_of_the_machine(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[1]) as packed:
        members = packed.getmembers()
    assert {(each.uid, each.gid, each.uname, each.gname, each.mtime) for each in members} == {
        (0, 0, "", "", 1_700_000_000)
    }
    assert {each.mode for each in members if each.isfile()} == {0o644, 0o755}


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    wanted = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and not _NOT_OURS & set(path.parts)
    }
    assert {"policies/default.toml", "policies/seccomp/default.toml", "runner/py.typed"} <= wanted
    scripts = f"plugin_runner-{runner.__version__}.data/scripts"
    wanted |= {f"{scripts}/{path.name}" for path in (ROOT / "scripts/entry").iterdir()}
    pages = f"plugin_runner-{runner.__version__}.data/data/share/doc/plugin-runner"
    wanted |= {f"{pages}/{name}" for name in ("README.md", "SECURITY.md", "CHANGELOG.md")}
    wanted |= {
        f"{pages}/docs/{path.name}"
        for end in ("md", "svg", "png")
        for path in (ROOT / "docs").glob(f"*.{end}")
    }
    manual = f"plugin_runner-{runner.__version__}.data/data/share/man/man1"
    wanted |= {f"{manual}/{name}.1" for name in ("runner", *(f"runner-{verb}" for verb in all_verbs()))}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == wanted


def test_the_wheel_installs_the_command_and_the_licence(wheel: Path) -> None:
    dist_info = zipfile.Path(wheel) / f"plugin_runner-{runner.__version__}.dist-info"
    installed = importlib.metadata.PathDistribution(dist_info)
    assert [(e.group, e.name, e.value) for e in installed.entry_points] == [
        ("console_scripts", "runner-console", "runner.cli:console_entry")
    ]
    # pip and setuptools change the #! line of Python scripts only.
    for name in ("runner", "runner-start"):
        packed = zipfile.Path(wheel) / f"plugin_runner-{runner.__version__}.data/scripts" / name
        assert packed.read_bytes() == (ROOT / "scripts/entry" / name).read_bytes()
    assert installed.metadata["License-Expression"] == "Apache-2.0"
    assert (dist_info / "licenses/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_an_installed_copy_runs_without_the_checkout(wheel: Path, tmp_path: Path, plugin_dir: Path) -> None:
    """Data files are found through the package, not relative to the checkout."""
    zipfile.ZipFile(wheel).extractall(tmp_path)

    def output_of(*args: str) -> str:
        env = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        argv = [sys.executable, *args]
        done = subprocess.run(argv, cwd="/", env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for package in PACKAGES:
        assert output_of("-c", f"import {package}; print({package}.__file__)").startswith(str(tmp_path))
    assert output_of("-m", "runner", "--version") == f"runner {build_version()}\n"  # as the checkout
    policy = tmp_path / "policies/default.toml"
    policy.write_text(policy.read_text() + "#")
    assert output_of("-m", "runner", "--version") == f"runner {build_version(str(tmp_path))}\n"
    assert build_version(str(tmp_path)) != build_version()
    # `explain` needs a policy, a seccomp filter and a contract's model.
    shutil.copytree(ROOT / "tests/plugins/demo", plugin_dir / "demo")
    assert output_of("-m", "runner", "explain", str(plugin_dir / "demo")).endswith("It would be launched.\n")
    # Unpacking a wheel drops the executable bit, which the programs of the examples need.
    for name in contract_names():
        unpacked = Path(example_folder(name).replace(str(ROOT), str(tmp_path), 1))
        assert not any(path.stat().st_mode & 0o111 for path in unpacked.rglob("*") if path.is_file())
        output_of("-m", "runner", "new", name, str(plugin_dir / name))
        assert any(path.stat().st_mode & 0o111 for path in (plugin_dir / name).rglob("*") if path.is_file())


@pytest.mark.broad
def test_an_environment_of_its_own_needs_no_compiled_extra(
    wheel: Path, tmp_path: Path, plugin_dir: Path
) -> None:
    """As pipx installs it: the command, policies and examples work, without python-prctl."""
    folder = tmp_path / 'an "odd" name\'s\nfolder'
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install"]
    subprocess.run([*pip, "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    # The dependencies of this environment stand for those that pip would download. One of them is taken out.
    (site,) = (folder / "venv/lib").glob("python3*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (site / "prctl.py").write_text("raise ImportError('the extra is not installed')\n")
    shutil.copytree(ROOT / "tests/plugins/demo", plugin_dir / "demo")

    def output_of(*args: str) -> str:
        env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        argv = [str(folder / "venv/bin/runner"), *args]
        done = subprocess.run(argv, cwd="/", env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert output_of("--version") == f"runner {build_version()}\n"
    # The pages that messages point to are there.
    ask = "from sandbox.doctor.pages import page; print(page('containers.md'))"
    found = subprocess.run([python, "-Ic", ask], cwd="/", capture_output=True, text=True, check=True).stdout
    assert found.rstrip("\n") == str(folder / "venv/share/doc/plugin-runner/docs/containers.md")
    assert Path(found.rstrip("\n")).read_bytes() == (ROOT / "docs/containers.md").read_bytes()
    assert "default" in output_of("explain", str(plugin_dir / "demo"))
    assert output_of("check", str(plugin_dir / "demo")).count("ok: ") == 1
    assert "_runner" in output_of("completion", "bash")


def test_an_installation_outside_of_environments_runs(wheel: Path, tmp_path: Path) -> None:
    """There `runner` starts the console script that pip made for the interpreter it installed for."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    target = tmp_path / "a folder"
    subprocess.run([*pip, "--no-index", "--target", str(target), str(wheel)], check=True)
    ask = "from sandbox.doctor.pages import page; print(page('containers.md'))"
    argv = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(target)!r}); {ask}"]
    found = subprocess.run(argv, cwd="/", capture_output=True, text=True, check=True).stdout
    assert found == f"{target}/share/doc/plugin-runner/docs/containers.md\n"
    assert sorted(os.listdir(target / "bin")) == ["runner", "runner-console", "runner-start"]
    env = {"PYTHONPATH": str(target), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    for name in ("runner", "runner-console"):
        argv = [str(target / "bin" / name), "--version"]
        done = subprocess.run(argv, cwd="/", env=env, capture_output=True, text=True, timeout=60)
        assert (done.stdout, done.stderr) == (f"runner {build_version()}\n", "")


def test_dependencies_are_those_that_layers_may_import() -> None:
    from tests.test_layers import MAY_IMPORT

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(
            each
            for extra in ("prctl", "serve", "oci", "gateway", "fleet")
            for each in project["optional-dependencies"][extra]
            if each != "plugin-runner[serve]"  # which gateway and fleet need too
        ),
    ]
    names = {
        requirement.partition(">=")[0]
        .replace("python-prctl", "prctl")
        .replace("pyyaml", "yaml")
        .replace("nats-py[nkeys]", "nats")
        .replace("-", "_")
        for requirement in wanted
    }
    brought = {"mcp_types", "httpx2", "pydantic_core"}  # by mcp and pydantic
    assert names == set(MAY_IMPORT) - brought
    assert all(">=" in requirement for requirement in wanted)


def test_only_the_extra_has_to_be_compiled(wheel: Path) -> None:
    """Everything else came as a wheel that was built elsewhere: pip names the machine of one built here."""
    dist_info = zipfile.Path(wheel) / f"plugin_runner-{runner.__version__}.dist-info"
    waiting = [*(importlib.metadata.PathDistribution(dist_info).requires or ())]
    assert [each for each in waiting if "prctl" in each] == ['python-prctl>=1.8.1; extra == "prctl"']
    seen: set[str] = set()
    while waiting:
        requirement, _, condition = waiting.pop().partition(";")
        name = re.match(r"[\w.-]+", requirement)
        if name is None or name[0] in seen or "extra" in condition:
            continue
        try:
            installed = importlib.metadata.distribution(name[0])
        except importlib.metadata.PackageNotFoundError:
            assert condition  # for another Python, or another system
            continue
        seen.add(name[0])
        waiting += installed.requires or ()
        tags = re.findall(r"^Tag: (\S+)$", installed.read_text("WHEEL") or "", re.MULTILINE)
        assert tags and all(re.search(r"-any$|manylinux|musllinux", tag) for tag in tags), name[0]
    assert {"trio", "pydantic", "h11", "cryptography"} <= seen
    # The control: the extra, where it is installed, was built here.
    try:
        compiled = importlib.metadata.distribution("python-prctl").read_text("WHEEL") or ""
    except importlib.metadata.PackageNotFoundError:
        return
    assert not re.search(r"manylinux|musllinux|-any$", compiled, re.MULTILINE)


def test_code_root_is_the_folder_of_the_packages() -> None:
    import sandbox

    assert Path(sandbox.CODE_ROOT).is_absolute()
    for package in PACKAGES:
        assert (Path(sandbox.CODE_ROOT) / package / "__init__.py").is_file()
