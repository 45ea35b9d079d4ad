"""`docker run` and `podman run`: what a command line asks for, in the words of a cage.

The options that are understood are those of _OPTIONS. With any other the command means something that a cage
may not give: it is left as it is, and the option is named. Decided by the words alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runner.install.image_reference import normal_reference
from runner.install.request import Request, UnusableSpec
from sandbox.paths.denied_paths import lexical_fault, normal
from sandbox.spec import Access, EnvRequest, ImageRoot, Limits, PathRequest, is_variable_name
from sandbox.speed.value import NamedTuple
from sandbox.units import parse_limit

_MOST_OPTIONS = 512


class ContainerRun(NamedTuple):
    """What a container would have."""

    image: ImageRoot
    paths: tuple[PathRequest, ...] = ()
    env: tuple[tuple[str, str | None], ...] = ()  # None: the variable that the entry or its host has
    env_files: tuple[str, ...] = ()
    limits: Limits = Limits()
    offline: bool = False  # it says so itself

    @property
    def request(self) -> Request:
        return Request("image", (self.image.reference,))

    def variables(self, given: Sequence[EnvRequest]) -> tuple[EnvRequest, ...]:
        """The variables of the container. `given`: those that the command itself would have, of which it
        passes on what its options name."""
        known = {each.name: each for each in given}
        return tuple(
            EnvRequest(name, value)
            if value is not None
            else known.get(name, EnvRequest(name, required=False))
            for name, value in dict(self.env).items()
        )


def container_of(argv: Sequence[str]) -> ContainerRun:
    """What `docker run …` asks for. Raises UnusableSpec."""
    words = list(argv[1:])
    if words[:1] == ["container"]:
        del words[0]
    if words[:1] != ["run"]:
        raise UnusableSpec("starts no new container")
    del words[0]
    run, count = ContainerRun(ImageRoot("", starts_own=True)), 0
    while words and words[0].startswith("-") and words[0] != "-":
        count += 1
        word = words.pop(0)
        if word == "--":
            break
        if count > _MOST_OPTIONS:
            raise UnusableSpec(f"has more than {_MOST_OPTIONS} options")
        for name, value in _split(word, words):
            run = _OPTIONS[name](run, value)
    if not words:
        raise UnusableSpec("names no image")
    reference, *args = words
    image = run.image._replace(reference=normal_reference(reference), args=tuple(args))
    return run._replace(image=image)


def _split(word: str, rest: list[str]) -> list[tuple[str, str]]:
    """The options of a word, with their values. Short ones without a value may stand together: -it."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        _require_known(name)
        if name in _FLAGS:
            return [(name, value or "true")]
        return [(name, value if equals else _next(name, rest))]
    found = []
    letters = word[1:]
    while letters:
        name, letters = f"-{letters[0]}", letters[1:]
        _require_known(name)
        if name in _FLAGS and not letters.startswith("="):
            found.append((name, "true"))
            continue
        found.append((name, letters.removeprefix("=") or _next(name, rest)))
        break
    return found


def _require_known(name: str) -> None:
    if name not in _OPTIONS:
        raise UnusableSpec(f"has an option that no cage has ({name[:40]!r})")


def _next(name: str, rest: list[str]) -> str:
    if not rest:
        raise UnusableSpec(f"has no value for {name}")
    return rest.pop(0)


# --- each option --------------------------------------------------------------------------------------------
# What it makes of a ContainerRun. Raises UnusableSpec.


def _same(run: ContainerRun, value: str) -> ContainerRun:
    """What every cage has, or does not need."""
    return run


def _env(run: ContainerRun, value: str) -> ContainerRun:
    name, equals, text = value.partition("=")
    if not is_variable_name(name):
        raise UnusableSpec(f"sets {name[:40]!r}, which is the name of no variable")
    return run._replace(env=(*run.env, (name, text if equals else None)))


def _env_file(run: ContainerRun, value: str) -> ContainerRun:
    if run.env_files:
        raise UnusableSpec("has --env-file twice")
    return run._replace(env_files=(value,))


def _volume(run: ContainerRun, value: str) -> ContainerRun:
    source, colon, rest = value.partition(":")
    dest, _, how = rest.partition(":")
    options = set(filter(None, how.split(",")))
    if not colon or not source.startswith("/"):
        raise UnusableSpec(f"has a volume of the engine's own (-v {value[:80]}), and a cage has folders only")
    if options - {"ro", "rw", "z", "Z"}:
        raise UnusableSpec(f"mounts a folder in a way that no cage has (-v {value[:80]})")
    return _shown(run, source, dest, "read" if "ro" in options else "write")


def _mount(run: ContainerRun, value: str) -> ContainerRun:
    fields = dict(field.partition("=")[::2] for field in value.split(","))
    kind = fields.pop("type", "volume")
    source, dest = (
        next((fields.pop(name) for name in names if name in fields), "")
        for names in (("source", "src"), ("target", "destination", "dst"))
    )
    if kind == "tmpfs" and not fields:
        return _tmpfs(run, dest)
    told = [fields.pop(name) for name in ("readonly", "ro") if name in fields]
    if unknown := next((each for each in told if each not in ("", "true", "1", "false", "0")), ""):
        raise UnusableSpec(f"has {unknown[:40]!r} for an option that is on or off (--mount {value[:80]})")
    access: Access = "read" if {"", "true", "1"}.intersection(told) else "write"
    if kind != "bind" or fields or not source.startswith("/"):
        raise UnusableSpec(f"mounts something that no cage has (--mount {value[:80]})")
    return _shown(run, source, dest, access)


def _shown(run: ContainerRun, source: str, dest: str, access: Access) -> ContainerRun:
    for path in (source, dest):
        if (fault := lexical_fault(path)) or "$" in path:
            raise UnusableSpec(
                f"mounts {path[:80]!r}, which {fault or 'has a variable that nobody fills in'}"
            )
    source, dest = normal(source), normal(dest)
    if source in dict(run.image.places):
        raise UnusableSpec(f"mounts {source[:80]!r} twice, and a cage shows a folder once")
    if dest in dict(run.image.places).values():
        raise UnusableSpec(f"mounts two things at {dest[:80]!r}")
    image = run.image._replace(places=(*run.image.places, (source, dest)))
    return run._replace(image=image, paths=(*run.paths, PathRequest(source, access)))


def _tmpfs(run: ContainerRun, value: str) -> ContainerRun:
    path = value.partition(":")[0]
    if fault := lexical_fault(path):
        raise UnusableSpec(f"has a --tmpfs that {fault}")
    return run._replace(image=run.image._replace(folders=(*run.image.folders, normal(path))))


def _directory(run: ContainerRun, value: str) -> ContainerRun:
    if fault := lexical_fault(value):
        raise UnusableSpec(f"has a working directory that {fault}")
    return run._replace(image=run.image._replace(directory=normal(value)))


def _network(run: ContainerRun, value: str) -> ContainerRun:
    if value != "none":
        raise UnusableSpec(f"joins a network of the engine's (--network {value[:40]})")
    return run._replace(offline=True)


def _amount(name: str, value: str) -> float:
    try:
        return parse_limit(name, value)
    except ValueError as error:
        raise UnusableSpec(f"has a limit that is none ({value[:40]}): {error}") from None


def _memory(run: ContainerRun, value: str) -> ContainerRun:
    found = int(_amount("memory", value.upper().removesuffix("B")))
    return run._replace(limits=run.limits._replace(memory=found))


def _cpus(run: ContainerRun, value: str) -> ContainerRun:
    return run._replace(limits=run.limits._replace(cpu=_amount("cpu", value)))


def _read_only(run: ContainerRun, value: str) -> ContainerRun:
    if value not in ("true", "false"):
        raise UnusableSpec(f"has {value[:40]!r} for an option that is on or off")
    return run._replace(image=run.image._replace(read_only=value == "true"))


_FLAGS = ("-i", "--interactive", "--rm", "--read-only")

# Every option that is understood.
_OPTIONS: dict[str, Callable[[ContainerRun, str], ContainerRun]] = {
    **dict.fromkeys(("-i", "--interactive", "--rm", "--name", "--pull"), _same),
    **dict.fromkeys(("-e", "--env"), _env),
    "--env-file": _env_file,
    **dict.fromkeys(("-v", "--volume"), _volume),
    "--mount": _mount,
    **dict.fromkeys(("-w", "--workdir"), _directory),
    **dict.fromkeys(("-u", "--user"), lambda run, value: run._replace(image=run.image._replace(user=value))),
    **dict.fromkeys(("--network", "--net"), _network),
    **dict.fromkeys(("-m", "--memory"), _memory),
    "--cpus": _cpus,
    "--read-only": _read_only,
    "--tmpfs": _tmpfs,
    "--entrypoint": lambda run, value: run._replace(image=run.image._replace(entrypoint=value)),
}
