"""What `docker run` asks for, in the words of a cage, and what of it no cage has."""

from __future__ import annotations

import shlex

import pytest

from runner.contracts.mcp.docker_run import ContainerRun, container_of
from runner.install.request import UnusableSpec
from sandbox.spec import EnvRequest, ImageRoot, Limits, PathRequest
from tests.tables import check_rows

_X = ImageRoot("docker.io/library/x:latest", starts_own=True)
_DATA = _X._replace(places=(("/home/me", "/data"),))
READ, WRITE = (PathRequest("/home/me", access) for access in ("read", "write"))

ROWS: dict[str, ContainerRun] = {
    "x": ContainerRun(_X),
    "-i --rm --name n --pull=always --network none x a -b": ContainerRun(
        _X._replace(args=("a", "-b")), offline=True
    ),
    "--interactive --rm=true -i -- x": ContainerRun(_X),
    "-e A=1 --env B -eC=2 --env=D= x": ContainerRun(_X, env=(("A", "1"), ("B", None), ("C", "2"), ("D", ""))),
    "--env-file /f x": ContainerRun(_X, env_files=("/f",)),
    "-v /home/me:/data x": ContainerRun(_DATA, (WRITE,)),
    "--volume=/home/me/:/data/:ro,z x": ContainerRun(_DATA, (READ,)),
    "--mount type=bind,src=/home/me,dst=/data x": ContainerRun(_DATA, (WRITE,)),
    "--mount type=bind,source=/home/me,target=/data,readonly x": ContainerRun(_DATA, (READ,)),
    "--mount type=bind,source=/home/me,destination=/data,ro=true x": ContainerRun(_DATA, (READ,)),
    "--mount type=tmpfs,dst=/scratch x": ContainerRun(_X._replace(folders=("/scratch",))),
    "--tmpfs /scratch:rw,size=1m x": ContainerRun(_X._replace(folders=("/scratch",))),
    "-w /work -u 1000:app x": ContainerRun(_X._replace(directory="/work", user="1000:app")),
    "--read-only --entrypoint sh x": ContainerRun(_X._replace(read_only=True, entrypoint="sh")),
    "-i=true --entrypoint= x a": ContainerRun(_X._replace(entrypoint="", args=("a",))),
    "-iv=/home/me:/data:ro x": ContainerRun(_DATA, (READ,)),
    "--mount type=bind,src=/home/me,dst=/data,ro=1,readonly=false x": ContainerRun(_DATA, (READ,)),
    "-m 512m --cpus 1.5 x": ContainerRun(_X, limits=Limits(memory=512 << 20, cpu=1.5)),
    "--memory=1gb x": ContainerRun(_X, limits=Limits(memory=1 << 30)),
}


def test_options_that_are_understood() -> None:
    def means(line: str, wanted: ContainerRun) -> None:
        assert container_of(("docker", "run", *shlex.split(line))) == wanted
        assert container_of(("/usr/bin/podman", "container", "run", *shlex.split(line))) == wanted

    check_rows(ROWS, means)


REFUSED = {
    "-it x": "'-t'",
    "--privileged x": "'--privileged'",
    "-p 80:80 x": "'-p'",
    "--network host x": "--network host",
    "--gpus=all x": "'--gpus'",
    "--cap-add SYS_ADMIN x": "'--cap-add'",
    "-v data:/data x": "volume of the engine's own",
    "-v /data x": "volume of the engine's own",
    "-v ${HOME}:/data x": "volume of the engine's own",
    "-v /home/$USER:/data x": "variable",
    "-v /home/me:data x": "'data'",
    "-v /home/me/..:/data x": "'..'",
    "-v /home/me:/data:rshared x": "in a way that no cage has",
    "-v /a:/b -v /a:/c x": "twice",
    "-v /a:/b -v /c:/b/ x": "two things at '/b'",
    "-v ~/a:/b x": "volume of the engine's own",
    "-v ./a:/b x": "volume of the engine's own",
    "-v /a:/b:ro:rw x": "in a way that no cage has",
    "-v /a: x": "is empty",
    "--mount type=bind,src=/a,dst=/b,readonly=TRUE x": "'TRUE' for an option that is on or off",
    "--mount type=bind,src=/a,source=/c,dst=/b x": "no cage has",
    '--mount type=bind,"src=/a,b",dst=/b x': "no cage has",
    "--rm --cpus inf x": "has a limit that is none",
    "-m -1 x": "has a limit that is none",
    "-ip 80:80 x": "'-p'",
    "-H tcp://x run y": "'-H'",
    "--mount type=volume,src=data,dst=/data x": "no cage has",
    "--mount type=bind,src=/a,dst=/b,bind-propagation=shared x": "no cage has",
    "-e A-B=1 x": "name of no variable",
    "--env-file a --env-file b x": "--env-file twice",
    "-m much x": "has a limit that is none",
    "--read-only=maybe x": "on or off",
    "-w work x": "working directory",
    "-i --rm": "names no image",
    "-e": "no value for -e",
    "X": "no reference",
    f"{'-i ' * 513} x": "more than 512 options",
}


def test_an_option_that_no_cage_has_is_named() -> None:
    def is_named(line: str, said: str) -> None:
        with pytest.raises(UnusableSpec) as refused:
            container_of(("docker", "run", *shlex.split(line)))
        assert said in str(refused.value) and str(refused.value).isprintable()

    check_rows(REFUSED, is_named)


def test_variables_are_those_that_the_options_name() -> None:
    """The entry's others are for docker itself."""
    run = container_of(("docker", "run", "-e", "A", "-e", "B", "-e", "C=own", "x"))
    given = (EnvRequest("A", "secret"), EnvRequest("OTHER", "x"), EnvRequest("C", "not this"))
    assert run.variables(given) == (
        EnvRequest("A", "secret"),
        EnvRequest("B", required=False),
        EnvRequest("C", "own"),
    )
