"""The options that several verbs share: what to run, under which policy and limits."""

from __future__ import annotations

import os
import stat

from runner.cli.shared.hiding import HIDE_HELP, hide_of
from runner.cli.shared.logging_in import add_ssh, ssh_of
from runner.contracts.registry import (
    all_contracts,
    command_contract,
    contract_options,
    find_contract,
    option_owners,
)
from runner.launch.stages import Invocation
from sandbox.document.diagnostic import did_you_mean, printable, quoted
from sandbox.spec import ImageRoot, Limits, Overrides, is_variable_name
from sandbox.speed.typed import TYPE_CHECKING, Any, Callable, Iterator, Sequence
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    import argparse

    from runner.cli.shared.events_file import EventsFile
    from runner.contracts.contract import ContractOption


def add_invocation(parser: argparse.ArgumentParser, *, launching: bool) -> None:
    parser.add_argument("manifest", metavar="MANIFEST", help="the plugin's manifest, or the folder it is in")
    add_manifest_choice(parser)
    add_launch(parser)
    add_config(parser)
    if launching:
        add_secrets(parser)
    add_contract_options(parser)
    parser.usage = f"{parser.prog} [options] MANIFEST" + (" [-- ARGS]" if launching else "")


def add_launch(parser: argparse.ArgumentParser) -> None:
    """The options of a launch of a manifest or of a command."""
    parser.add_argument(
        "--policy",
        metavar="NAME|FILE",
        help="a policy by name (default, strict, dev) or file; without it $RUNNER_POLICY, then"
        " /etc/runner/policy.toml, then default",
    )
    parser.add_argument(
        "--state-dir",
        metavar="D",
        help="the directory for the plugin's ${state_dir}, if it asks for one; each plugin needs its own",
    )
    parser.add_argument(
        "--env",
        metavar="K=V",
        action="append",
        default=[],
        help="give the plugin a variable; K alone passes on the runner's own value",
    )
    parser.add_argument(
        "--staged",
        action="store_true",
        help="keep what it writes apart, until runner apply takes it",
    )
    parser.add_argument("--hide", metavar="NAME[@HOST]", action="append", default=[], help=HIDE_HELP)
    add_ssh(parser)
    add_image(parser)
    add_limits(parser)
    parser.set_defaults(arguments=[])


def add_image(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--image",
        metavar="IMAGE",
        help="start it in an installed image, in place of this machine's own files",
    )
    parser.add_argument("--user", metavar="USER[:GROUP]", help="with --image: who it is in it")


def add_secrets(parser: argparse.ArgumentParser) -> None:
    """For verbs that start a plugin."""
    parser.add_argument(
        "--secret",
        metavar="NAME=@FILE|env:NAME",
        action="append",
        default=[],
        help="a secret for the plugin; hidden from 8 characters on",
    )


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="JSON|@FILE", help="the plugin's configuration, if its contract has one"
    )


def config_of(word: str | None) -> str:
    """--config as JSON text; empty if it was not given. ValueError says what is wrong with it."""
    if word is None:
        return ""
    import json

    from runner.cli.shared.json_option import read_json_option

    return json.dumps(read_json_option("--config", word))


# The limits people reach for have options of their own; --limit knows them all.
_OPTIONS = (
    ("memory", "SIZE", "memory of all its processes, with what they keep in /tmp and /dev/shm"),
    ("pids", "N", "processes and threads"),
    ("cpu", "CORES", "0.5, 2 or 50%%"),
    ("cpu_time", "TIME", "processor time"),
    ("deadline", "TIME", "time from start to end"),
)


def add_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group(
        "limits",
        "The lowest of these, the manifest's and the policy's limits applies.\n"
        "Sizes are written 512K, 256M, 1.5G; times 500ms, 30s, 1h30m.",
    )
    for name, metavar, about in _OPTIONS:
        option = "--" + name.replace("_", "-")
        limits.add_argument(
            option,
            metavar=metavar,
            help=about,
            dest="limits",
            action="append",
            default=[],
            type=_limit_parser(name),
        )
    have_one = [name for name, _, _ in _OPTIONS]
    others = ", ".join(name for name in Limits._fields if name not in have_one)
    limits.add_argument(
        "--limit",
        metavar="NAME=VALUE",
        help=f"any limit by its name, one per option; besides the above: {others}",
        dest="limits",
        action="append",
        default=[],
        type=_LimitOption.parse,
    )


class _LimitOption(NamedTuple):
    """A limit as it stands on the command line. `words` begin the message about it."""

    words: str
    name: str
    value: str | None  # None: there was no "="

    @classmethod
    def parse(cls, word: str) -> _LimitOption:
        name, equals, value = word.partition("=")
        return cls(f"--limit {word}", name, value if equals else None)


def _limit_parser(name: str) -> Callable[[str], _LimitOption]:
    return lambda value: _LimitOption(f"--{name.replace('_', '-')} {value}", name, value)


def add_manifest_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--contract",
        metavar="NAME",
        help="read the manifest as this contract's, whatever its content and name",
    )
    parser.add_argument(
        "--server", metavar="NAME", help="which plugin of a manifest that lists several servers"
    )


def add_contract_options(parser: argparse.ArgumentParser, verb: str = "") -> None:
    """The options that contracts bring along for this verb, or for another one that has the same."""
    options = contract_options(verb or parser.prog.rpartition(" ")[2])
    if not options:
        return
    group = parser.add_argument_group(
        "options of contracts", "Each is for plugins of the contracts that have it, and refused for others."
    )
    for option in options.values():
        group.add_argument(
            option.flag,
            metavar=option.metavar,
            help=option.help.replace("%", "%%"),  # argparse would fill it in
            dest=_CONTRACT_DEST + option.name,
        )


# Keeps their values apart from our own options in what argparse returns.
_CONTRACT_DEST = "contract_option_"

_MOST_FILE_BYTES = 1 << 20  # of a file that an option of a contract names
_WRITER_SECONDS = 5.0  # to wait for a writer to open a FIFO
_WRITER_POLL_SECONDS = 0.1
_MOST_SECRET_BYTES = 1 << 20  # the limit of all secrets together (sandbox/cell/contents.py)


def contract_options_of(args: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """The values given for options of contracts, by name. ValueError: one is empty, or names a file that
    cannot be read. Secrets are left out: a launch stores and passes on these values."""
    found: list[tuple[str, str]] = []
    for name, value, option in _given_options(args):
        if option is not None and option.secret:
            continue
        if option is None or not option.reads_file:
            found.append((name, value))
        else:
            found += [(name, _file_text(option.flag, value)), (f"{name}_file", value)]
    return tuple(found)


def _given_options(args: argparse.Namespace) -> Iterator[tuple[str, str, ContractOption | None]]:
    """The options of contracts that were given, with their values. Contracts may share a flag: then the
    plugin's own contract decides. None: that contract has no such option, and `load` refuses it."""
    for dest, value in vars(args).items():
        if not dest.startswith(_CONTRACT_DEST) or value is None:
            continue
        name = dest.removeprefix(_CONTRACT_DEST)
        if value == "":
            raise ValueError(_empty(name))
        owners = {
            contract.name: option
            for contract in all_contracts()
            for option in contract.options
            if option.name == name
        }
        first, *others = owners.values()
        if any((each.secret, each.reads_file) != (first.secret, first.reads_file) for each in others):
            yield name, value, owners.get(contract_at_args(args) or "")
        else:
            yield name, value, first


def contract_at_args(args: argparse.Namespace) -> str | None:
    """The contract of what the options name. None: the launch will say what is wrong with the manifest."""
    if is_command(args) and not hasattr(args, "manifests"):
        return command_contract()
    from runner.manifest.load import contract_at

    several = getattr(args, "manifests", None)  # of `check`: the first counts
    server = getattr(args, "server", None)
    return contract_at(several[0] if several else args.manifest, args.contract, server)


def _file_text(flag: str, path: str) -> str:
    raw = _read_file(f"{flag} ", path, path, _MOST_FILE_BYTES)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {path}: byte {error.start} of it is not UTF-8") from None


class _NobodyWrites(Exception):
    pass


def _read_pipe(pipe: int, most: int) -> bytes:
    """Read a non-blocking pipe until all writers have closed it, or up to `most` bytes. Raises _NobodyWrites
    if no writer opens it in time. A blocking open would wait for ever."""
    import select
    import time

    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    until = time.monotonic() + _WRITER_SECONDS
    found, has_writer = b"", False
    while len(found) < most:
        try:
            data = os.read(pipe, most - len(found))
        except BlockingIOError:
            has_writer = True
            poll.poll()  # without a limit: the writer may ask a person for a password
            continue
        if not data and (found or has_writer):
            break
        found += data
        if not data:
            # poll() does not report a writer that has written nothing: the next read finds out.
            has_writer = bool(poll.poll(_WRITER_POLL_SECONDS * 1000))
            if not has_writer and time.monotonic() >= until:
                raise _NobodyWrites
    return found


def _read_file(flag: str, path: str, shown: str, most: int) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY), "rb") as file:
            if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
                raw = _read_pipe(file.fileno(), most + 1)
            else:
                os.set_blocking(file.fileno(), True)
                raw = file.read(most + 1)
    except _NobodyWrites:
        told = f"it is a FIFO, and nobody has opened it for writing within {_WRITER_SECONDS:g} s"
        raise ValueError(f"{flag}{shown}: {told}; start the program that writes to it first") from None
    except OSError as error:
        raise ValueError(f"{flag}{shown}: {error.strerror}") from None
    except ValueError:
        raise ValueError(f"{flag}{shown}: this cannot be the name of a file") from None
    if len(raw) > most:
        raise ValueError(f"{flag}{shown}: it has more than {most >> 20} MiB")
    return raw


# --- secrets ------------------------------------------------------------------------------------------------


def secrets_of(args: argparse.Namespace) -> dict[str, bytes]:
    """The operator's secrets: those of --secret by their name, those of contracts' options by their flag.
    ValueError says what is wrong, and nothing of a secret."""
    found: dict[str, bytes] = {}
    for word in getattr(args, "secret", ()):
        name, equals, source = word.partition("=")
        if not equals or not name or name.startswith("-"):
            raise ValueError("--secret: write NAME=@FILE, or NAME=env:VARIABLE")
        if name in found:
            raise ValueError(f"--secret {printable(name)}: it is given twice")
        found[name] = read_secret(f"--secret {printable(name)}=", source)
    if found:
        contract = contract_at_args(args)
        if contract is not None and "secret_files" not in (takes := find_contract(contract).takes):
            other = "; use --secrets" if "secrets" in takes else "; pass it as a variable: --env NAME"
            raise ValueError(f"--secret: the contract {contract} has no secrets in files{other}")
    for name, value, option in _given_options(args):
        if option is not None and option.secret:
            _require_own(args, name, option)
            # A line end behind a token in a file is not part of it.
            found[option.flag] = read_secret(f"{option.flag} ", value).removesuffix(b"\n").removesuffix(b"\r")
    return found


def _require_own(args: argparse.Namespace, name: str, option: ContractOption) -> None:
    """Raises ValueError if the option belongs to another contract. `load` checks options that are no
    secrets."""
    contract, owners = contract_at_args(args), option_owners(name)
    if contract is not None and contract not in owners:
        belongs = f"{option.flag} belongs to {' and '.join(owners)}, and this is a manifest of {contract}"
        raise ValueError(f"{belongs}; leave {option.flag} out")


def read_secret(flag: str, source: str) -> bytes:
    """Returns the bytes that @FILE or env:NAME stands for. Raises ValueError, whose text has no secret."""
    if source.startswith("@"):
        raw = _read_file(flag, source[1:], source, _MOST_SECRET_BYTES)
        if not raw:
            raise ValueError(f"{flag}{source}: the file is empty")
        return raw
    if source.startswith("env:"):
        value = os.environb.get(os.fsencode(source[4:]))
        if not value:
            what = "there is no such variable" if value is None else "the variable is empty"
            raise ValueError(f"{flag}{source}: {what}")
        return value
    raise ValueError(
        f"{flag.rstrip(' =')}: write @FILE, or env:NAME for a variable; everybody on this machine can read a"
        " command line"
    )


def _empty(name: str) -> str:
    return f"--{name.replace('_', '-')}: its value is empty; is a variable unset?"


def invocation_of(args: argparse.Namespace) -> Invocation:
    """ValueError says what is wrong with the options."""
    if is_command(args):
        return _command_invocation(args)
    for option in ("policy", "state_dir", "contract", "server"):
        if getattr(args, option) == "":
            raise ValueError(_empty(option))
    env: list[tuple[str, str]] = []
    names: list[str] = []
    for word in args.env:
        name, equals, value = word.partition("=")
        if not is_variable_name(name):
            raise ValueError(f"--env {word}: {name!r} is not the name of a variable")
        if equals:
            env.append((name, value))
        elif name in os.environ:
            names.append(name)
        else:
            raise ValueError(
                f"--env {name}: the runner's environment has no such variable; to set it write {name}=VALUE"
            )
    return Invocation(
        manifest=args.manifest,
        contract=args.contract,
        server=args.server,
        policy=args.policy,
        state_dir=args.state_dir,
        args=tuple(args.arguments),
        overrides=Overrides(
            tuple(env),
            tuple(names),
            limits_of(args.limits),
            args.staged,
            hide_of(args.hide),
            ssh_of(args),
            image_of(args),
        ),
        options=contract_options_of(args),
        config=config_of(args.config),
    )


def image_of(args: argparse.Namespace) -> ImageRoot | None:
    """The image of --image. Raises ValueError."""
    if args.image is None:
        if args.user is not None:
            raise ValueError("--user: it goes with --image; without one, every plugin is nobody in its cage")
        return None
    from runner.install.image_reference import normal_reference
    from runner.install.request import UnusableSpec

    try:
        return ImageRoot(normal_reference(args.image), user=args.user or "")
    except UnusableSpec as fault:
        raise ValueError(f"--image: it {fault}") from None


def add_command_invocation(parser: argparse.ArgumentParser) -> None:
    """A command in the place of a manifest, for verbs that know both."""
    from runner.cli.shared.command import add_command

    add_command(parser)
    add_launch(parser)
    parser.set_defaults(manifest=None, contract=None, server=None, config=None, secret=[])


def open_events(target: str | None) -> EventsFile | None:
    """The place of --events, if there is one. Raises ReportFileError."""
    if target is None:
        return None
    from runner.cli.shared.events_file import EventsFile

    return EventsFile(target)


def is_command(args: argparse.Namespace) -> bool:
    """Whether what follows -- is a command, and not arguments for a manifest's command."""
    return getattr(args, "manifest", None) is None


def _command_invocation(args: argparse.Namespace) -> Invocation:
    from runner.cli.shared.command import command_of

    for option in ("policy", "state_dir"):
        if getattr(args, option) == "":
            raise ValueError(_empty(option))
    return Invocation(
        manifest="",
        policy=args.policy,
        state_dir=args.state_dir,
        overrides=Overrides(limits=limits_of(args.limits), staged=args.staged),
        command=command_of(args, image=image_of(args)),
    )


def limits_of(limits: Sequence[_LimitOption]) -> Limits:
    """Raises ValueError."""
    if not limits:
        return Limits()
    from sandbox.units import parse_limit

    found: dict[str, Any] = {}
    for words, name, value in limits:
        if value is None:
            raise ValueError(f"{words}: write NAME=VALUE, as in memory=256M")
        if name not in Limits._fields:
            hint = did_you_mean(name, Limits._fields) or f"there are {', '.join(Limits._fields)}"
            raise ValueError(f"{words}: no limit is called {quoted(name)}; {hint}")
        if name in found:
            raise ValueError(f"{words}: {name} is given twice")
        try:
            found[name] = parse_limit(name, value)
        except ValueError as error:
            raise ValueError(f"{words}: {error}") from None
    return Limits(**found)
