"""A command line behind `--`, and the options that say what it may have."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from runner.cli.shared.hiding import hide_of, with_hidden_hosts
from runner.cli.shared.logging_in import ssh_of, with_ssh_hosts
from runner.contracts.configurations import PLUGIN_PREFIX, WRAP_FORMAT, EntryFound, WrappedEntry
from runner.launch.command import Command
from sandbox import look
from sandbox.document.diagnostic import printable
from sandbox.facts import HOST_VARIABLE
from sandbox.paths.denied_paths import lexical_fault
from sandbox.policy.policy import steers
from sandbox.spec import (
    STATE_DIR_TOKEN,
    Access,
    EnvRequest,
    ImageRoot,
    Network,
    PathRequest,
    SandboxSpec,
    is_variable_name,
)
from sandbox.speed.typed import Mapping

if TYPE_CHECKING:
    import argparse

_HTTPS = (443,)  # the port of a host without one
NET_HELP = (
    "let it reach a host by name (port 443 if there is none); localhost:PORT is that port of this machine "
    "if the policy's loopback has it; `host` is the host's whole network"
)
_LONGEST = 128


def add_command(parser: argparse.ArgumentParser) -> None:
    """The options of a command. The policy decides whether what they allow is granted."""
    group = parser.add_argument_group(
        "what the command may have",
        "Beyond its own files and the system's, as far as [approvals] in the policy lets you allow it.",
    )
    group.add_argument(
        "--name",
        metavar="NAME",
        dest="command_name",
        help="keep a state directory and approvals for it, under this name",
    )
    group.add_argument(
        "--read", metavar="PATH", action="append", default=[], help="show it a file or folder, read-only"
    )
    group.add_argument(
        "--write", metavar="PATH", action="append", default=[], help="let it write a file or folder"
    )
    group.add_argument(
        "--net",
        metavar="HOST[:PORT]",
        action="append",
        default=[],
        help=NET_HELP,
    )
    group.add_argument("--cwd", metavar="DIR", help="start it in this folder, which another option must show")
    group.add_argument(
        "--project",
        metavar="write",
        nargs="?",
        const="read",
        choices=("read", "write"),
        help="show it the folder it starts in, read-only; --project=write lets it write there",
    )
    # What `runner wrap` needs to undo its change, and the configuration that the entry is in.
    import argparse as _argparse

    group.add_argument("--wrapped", metavar="JSON", help=_argparse.SUPPRESS)
    group.add_argument("--env-file", metavar="FILE", help=_argparse.SUPPRESS)  # that the entry named


def command_of(
    args: argparse.Namespace,
    *,
    directory: str = "",
    environ: Mapping[str, str] | None = None,
    image: ImageRoot | None = None,
) -> Command:
    """The command of the options. `directory` and `environ`: by default those of this process. `image`: the
    command line is for its entry point. Raises ValueError if the options are wrong."""
    # The variables that a host has set. The runner has dropped its own environment by then.
    given = getattr(args, "host_environ", None) if environ is None else environ
    if given is not None:
        given = look.environment(given, HOST_VARIABLE)
    environ = os.environ if given is None else given
    if image is not None:
        image = image._replace(starts_own=True, args=tuple(args.arguments))
        args.arguments = [image.reference, *args.arguments]
    if not args.arguments:
        raise ValueError("there is no command; write it behind --, as in runner run -- ls -l")
    if not args.arguments[0]:
        raise ValueError("the command is empty; is a variable unset?")
    name = _name(args.command_name)
    here = _here(args.cwd, directory)
    paths = [_request(path_of("--read", word, directory), "read") for word in args.read]
    paths += [_request(path_of("--write", word, directory), "write") for word in args.write]
    if args.project is not None:
        paths.append(_request(here, "write" if args.project == "write" else "read"))
    file, scope, outdated = wrapped_record(args.wrapped)
    wrapped = args.wrapped is not None
    words = tuple(args.words) if wrapped else ()
    options = words[: len(words) - len(args.arguments) - 1]
    entry = WrappedEntry(file, name, scope, options, tuple(args.arguments), outdated)
    found = _found(entry, environ) if wrapped else None
    if found is not None and found.image:
        image = ImageRoot(found.image)
    if args.env_file is not None and not (wrapped and args.env_file):
        raise ValueError("--env-file: only runner wrap writes it; use --env NAME=VALUE")
    variables = _plugin_variables(environ) if wrapped else {}
    hide, ssh = hide_of(args.hide), ssh_of(args)
    if not name and any(STATE_DIR_TOKEN in word for word in (*args.arguments, *args.env)):
        raise ValueError(f"{STATE_DIR_TOKEN}: only a command with a --name has a state directory")
    return Command(
        argv=tuple(args.arguments),
        directory=here,
        name=name,
        file=file,
        spec=SandboxSpec(
            paths=tuple(dict.fromkeys(paths)),
            network=with_ssh_hosts(with_hidden_hosts(network_of(args.net), hide), ssh),
            hide=hide,
            ssh=ssh,
            image=image,
            env=tuple({**_variables(args.env, environ, found), **variables}.values()),
        ),
        named_directory=args.cwd is not None or args.project is not None,
        scope=scope,
        env_file=args.env_file or "",
        env_file_folder="" if found is None else found.folder,
        search_path=variables["PATH"].value or "" if "PATH" in variables else "",
        host_environ=given if wrapped else None,
        outdated=outdated,
        filled=found is not None and found.filled,
        entry_directory="" if found is None else found.directory,
        other_program="" if found is None else found.program,
        dropped=() if found is None else found.dropped,
    )


def _found(entry: WrappedEntry, environ: Mapping[str, str]) -> EntryFound:
    from runner.contracts.registry import command_contract, find_contract

    hosts = find_contract(command_contract()).configurations
    assert hosts is not None  # which makes it that contract
    return hosts.find_entry(entry, environ)


def _plugin_variables(environ: Mapping[str, str]) -> dict[str, EnvRequest]:
    """The variables of a wrapped entry, under their own names."""
    found = {name.removeprefix(PLUGIN_PREFIX): name for name in environ if name.startswith(PLUGIN_PREFIX)}
    return {name: EnvRequest(name, environ[given]) for name, given in found.items() if is_variable_name(name)}


def _request(path: str, access: Access) -> PathRequest:
    return PathRequest(path, access, origin="command line")


def _name(name: str | None) -> str:
    if name is None:
        return ""
    if (
        not name.strip()
        or not name.isprintable()
        or "/" in name
        or len(name) > _LONGEST
        or name in (".", "..")
    ):
        raise ValueError(f"--name {printable(name)}: 1 to {_LONGEST} printable characters without a slash")
    return name


def _here(cwd: str | None, directory: str) -> str:
    if cwd == "":
        raise ValueError("--cwd: its value is empty; is a variable unset?")
    try:
        here = look.realpath(os.path.join(directory or os.getcwd(), cwd or ""))
    except OSError as error:
        raise ValueError(f"the current folder cannot be used: {error.strerror}; use --cwd DIR") from None
    except ValueError:
        raise ValueError(f"--cwd {printable(cwd or '')}: it has a NUL character") from None
    if cwd is not None and not look.isdir(here):
        raise ValueError(f"--cwd {cwd}: there is no such folder")
    return here


def path_of(option: str, word: str, directory: str = "") -> str:
    """A path of the command line, made absolute. Links are resolved and checked when the plan is made."""
    if not word:
        raise ValueError(f"{option}: its value is empty; is a variable unset?")
    path = os.path.normpath(os.path.join(directory or os.getcwd(), os.path.expanduser(word)))
    path = "/" + path.lstrip("/")
    if fault := lexical_fault(path):
        raise ValueError(f"{option} {word}: the path {fault}")
    return path


def network_of(words: list[str]) -> Network | None:
    """The network that --net asks for. Raises ValueError if it is wrong."""
    if not words:
        return None
    if "host" in words:
        if len(words) > 1:
            raise ValueError("--net host: it covers every host; leave the others out")
        return Network("host")
    from sandbox.network.rules import parse_rule, ports_fault  # most launches do not need it

    hosts: dict[str, None] = {}
    for word in words:
        try:
            rule = parse_rule(word, default_ports=_HTTPS)
            if rule.kind == "any":
                raise ValueError("stands for every name; name the hosts, or use --net host")
        except ValueError as error:
            raise ValueError(f"--net {word}: it {error}; write HOST:PORT, as in example.com:443") from None
        hosts[str(rule)] = None
    if fault := ports_fault(map(parse_rule, hosts)):
        raise ValueError(f"--net: the list {fault}")
    return Network("allowlist", tuple(hosts))


def _variables(
    words: list[str], environ: Mapping[str, str], entry: EntryFound | None
) -> dict[str, EnvRequest]:
    """The variables of --env. `entry`: of a configuration; then variables of the host that the entry does not
    set itself need an approval."""
    found: dict[str, EnvRequest] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not is_variable_name(name):
            raise ValueError(f"--env {word}: {name!r} is not the name of a variable")
        if equals:
            found[name] = EnvRequest(name, value)
        elif name in environ and entry is not None:
            is_own = entry.variables is None or name in entry.variables
            # A variable that decides which code runs is treated like an argument.
            found[name] = EnvRequest(name, environ[name] if is_own or steers(name) else None, required=False)
        elif name in environ:
            found[name] = EnvRequest(name)
        elif entry is None:  # a host may leave out a variable of its configuration
            raise ValueError(
                f"--env {name}: the runner's environment has no such variable; to set it write {name}=VALUE"
            )
    return found


def wrapped_record(text: str | None) -> tuple[str, str, bool]:
    """Parse --wrapped: the configuration file of the entry, its project if that file has entries of several,
    and whether an earlier version wrote it."""
    if text is None:
        return "", "", False
    import json

    wrong = "--wrapped: it is not what runner wrap writes; run runner wrap again"
    try:
        record = json.loads(text)
        file, scope = record.get("file", ""), record.get("scope", "")
        os.fsencode(file + scope)  # half of a surrogate pair is no character, and no part of a path
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise ValueError(wrong) from None
    if not isinstance(file, str) or "\0" in file + scope or not file.startswith("/"):
        raise ValueError(wrong)
    return file, scope, record.get("format") != WRAP_FORMAT
