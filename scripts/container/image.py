"""Build the Dockerfile's image without a container engine: mmdebstrap for FROM, runc for RUN.

The Dockerfile itself is read, so the test builds what it says. An instruction that is not known here is an
error and is never skipped.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
from pathlib import Path
from typing import NamedTuple

from scripts.container.runc import Config, Mount, Runc

BUILD_SECONDS = 900
_BASE = re.compile(r"debian:(?P<suite>[a-z]+)-slim")
# The build reaches registries in the same way as this machine.
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_PASSED = re.compile(r"PIP_.*|(https?|ftp|no|all)_proxy", re.IGNORECASE)


class Instruction(NamedTuple):
    word: str
    flags: dict[str, str]
    rest: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.rest)


class Stage(NamedTuple):
    name: str
    suite: str
    instructions: tuple[Instruction, ...]


class Image(NamedTuple):
    root: Path
    environment: dict[str, str]
    user: str
    entrypoint: tuple[str, ...]


class BuildError(Exception):
    """A step of the Dockerfile failed, or is not understood here."""


def read_dockerfile(text: str) -> tuple[Stage, ...]:
    joined = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    stages: list[Stage] = []
    for line in filter(str.strip, joined.splitlines()):
        word, _, rest = line.strip().partition(" ")
        flags = {}
        while match := re.match(r"--([a-z]+)=(\S+)\s+", rest.lstrip()):
            flags[match[1]] = match[2]
            rest = rest.lstrip()[match.end() :]
        if word == "FROM":
            base, *alias = rest.split()
            known = _BASE.fullmatch(base)
            if known is None:
                raise BuildError(f"FROM {rest}: only debian:SUITE-slim can be made here")
            stages.append(Stage(alias[1] if alias else "", known["suite"], ()))
        else:
            last = stages.pop()
            step = Instruction(word, flags, rest.strip())
            stages.append(last._replace(instructions=(*last.instructions, step)))
    return tuple(stages)


def packages(stage: Stage) -> tuple[str, ...]:
    """The packages that its apt-get install lines name."""
    found: list[str] = []
    for step in stage.instructions:
        if step.word == "RUN":
            for command in step.rest.split("&&"):
                words = command.split()
                if words[:2] == ["apt-get", "install"]:
                    found += [word for word in words[2:] if not word.startswith("-")]
    return tuple(found)


def copied(stages: tuple[Stage, ...]) -> list[str]:
    """What the COPY lines take from the checkout."""
    steps = (step for stage in stages for step in stage.instructions)
    return [
        source
        for step in steps
        if step.word == "COPY" and "from" not in step.flags
        for source in step.words[:-1]
    ]


def build(dockerfile: Path, context: Path, work: Path, runc: Runc) -> Image:
    """Build all stages in `work`. Returns the root directory of the last one."""
    bases: dict[str, Path] = {}
    roots: dict[str, Path] = {}
    image: Image | None = None
    for number, stage in enumerate(read_dockerfile(dockerfile.read_text())):
        if stage.suite not in bases:
            bases[stage.suite] = _bootstrap(stage.suite, work / f"base-{stage.suite}")
        root = work / f"stage-{number}"
        subprocess.run(["cp", "-a", "--reflink=auto", str(bases[stage.suite]), str(root)], check=True)
        roots[stage.name] = root
        image = _build_stage(stage, root, context, roots, runc)
    if image is None:
        raise BuildError(f"{dockerfile}: no FROM")
    return image


def _bootstrap(suite: str, root: Path) -> Path:
    print(f"  FROM debian:{suite}-slim, by mmdebstrap", flush=True)
    argv = ["mmdebstrap", "--quiet", "--variant=minbase", suite, str(root)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=BUILD_SECONDS)
    if done.returncode:
        raise BuildError(f"mmdebstrap failed:\n{done.stderr[-2000:]}")
    return root


def _build_stage(stage: Stage, root: Path, context: Path, roots: dict[str, Path], runc: Runc) -> Image:
    environment: dict[str, str] = {}
    user, entrypoint, directory = "0:0", (), "/"
    for step in stage.instructions:
        print(f"  {step.word} {step.rest[:100]}", flush=True)
        match step.word:
            case "RUN":
                _run(step, root, directory, environment, runc)
            case "COPY":
                _copy(step, root, directory, roots[step.flags["from"]] if "from" in step.flags else context)
            case "WORKDIR":
                directory = os.path.join(directory, step.rest)
                (root / directory.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "ENV":
                environment.update((name, value) for name, _, value in (w.partition("=") for w in step.words))
            case "USER":
                user = step.rest
            case "ENTRYPOINT":
                entrypoint = tuple(json.loads(step.rest))
            case "CMD" | "LABEL":
                pass
            case _:
                raise BuildError(f"{step.word}: this instruction is not known here; teach {__file__}")
    return Image(root, environment, user, entrypoint)


def _run(step: Instruction, root: Path, directory: str, environment: dict[str, str], runc: Runc) -> None:
    if step.flags:
        raise BuildError(f"RUN with {step.flags} is not known here; teach {__file__}")
    passed = {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)}
    mounts = [Mount(str(path), str(path), ("ro",)) for path in _registries()]
    if os.path.exists(_CERTIFICATES):
        # Not at its usual path, where a package of the image may want to write.
        mounts.append(Mount(_CERTIFICATES, "/mnt/certificates", ("ro",)))
        passed["PIP_CERT"] = "/mnt/certificates"
    new = [path for mount in mounts if not (path := root / mount.target.lstrip("/")).exists()]
    config = Config(
        root=root,
        argv=("/bin/sh", "-c", step.rest),
        environment={**passed, "DEBIAN_FRONTEND": "noninteractive", "HOME": "/root", **environment},
        directory=directory,
        network=True,
        mounts=tuple(mounts),
        trusted=True,
    )
    done = runc.run(config, timeout=BUILD_SECONDS)
    for path in new:  # what runc made to mount on
        path.rmdir() if path.is_dir() else path.unlink()
    if done.code:
        raise BuildError(
            f"RUN {step.rest}\nended with {done.code}:\n{done.output[-1500:]}{done.error[-1500:]}"
        )


def _registries() -> list[Path]:
    """Files and folders of this machine that are needed to resolve names and find packages."""
    argv = ["python3", "-m", "pip", "config", "list"]
    configuration = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
    configuration += " ".join(value for name, value in os.environ.items() if _PASSED.fullmatch(name))
    words = re.findall(r"(?<![\w:/.])(?:file://)?(/[^\s'\",]+)", configuration)
    settings = ["/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/root/.config/pip/pip.conf"]
    found = {os.path.realpath(path) if path == "/etc/resolv.conf" else path for path in settings}
    found |= {word for word in words if os.path.exists(word) and not word.startswith("/etc/ssl/")}
    # If a folder and a file in it are both listed, the folder. A simple index links to the files beside it.
    places = {str(Path(path).parent) if path.endswith("/simple") else path for path in found}
    return sorted(Path(path) for path in places if os.path.exists(path))


def _copy(step: Instruction, root: Path, directory: str, origin: Path) -> None:
    if unknown := set(step.flags) - {"from", "chmod"}:
        raise BuildError(f"COPY with {unknown} is not known here; teach {__file__}")
    *sources, destination = step.words
    target = root / os.path.join(directory, destination).lstrip("/")
    for source in sources:
        path = origin / source.lstrip("/")
        into = target / path.name if destination.endswith("/") and path.is_file() else target
        _make_parents(into.parent)
        if path.is_dir():
            shutil.copytree(path, into, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy2(path, into)
        if "from" not in step.flags:
            subprocess.run(["chown", "-R", "0:0", str(into)], check=True)
        if "chmod" in step.flags:
            into.chmod(int(step.flags["chmod"], 8))


def _make_parents(path: Path) -> None:
    """Make directories with the modes that engines use, whatever the umask of this process."""
    if not path.exists():
        _make_parents(path.parent)
        path.mkdir()
        path.chmod(0o755)


def shifted(root: Path, target: Path, first: int) -> Path:
    """A copy whose files belong to the ids of a user namespace that begins at `first`."""
    subprocess.run(["cp", "-a", "--reflink=auto", str(root), str(target)], check=True)
    for folder, folders, files in os.walk(target):
        for name in (".", *folders, *files):
            path = os.path.join(folder, name)
            held = os.lstat(path)
            if held.st_uid < first:
                os.lchown(path, held.st_uid + first, held.st_gid + first)
                if not stat.S_ISLNK(held.st_mode):
                    os.chmod(path, stat.S_IMODE(held.st_mode))
    return target
