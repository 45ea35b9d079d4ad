"""runner run: any command in a cage, without a manifest."""

from __future__ import annotations

from runner.cli.exec import add_streams, launch
from runner.cli.shared.command import add_command
from runner.cli.shared.options import add_launch
from sandbox.speed.typed import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

NAME = "run"
EXAMPLE = "runner run --read ./data --net api.example.com:443 -- ./server --port 8080"
PASSES_ARGUMENTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_command(parser)
    add_launch(parser)
    add_streams(parser)
    parser.usage = f"{parser.prog} [options] -- COMMAND [ARGS]"


def advice(message: str) -> str:
    if message.startswith("unrecognized arguments: "):
        return "the command goes behind --, as in runner run -- ls -l"
    return ""


def run(args: argparse.Namespace) -> int:
    return launch(args, NAME)
