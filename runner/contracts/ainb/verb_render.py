"""runner render: draw what a plugin shows on its screen."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from typing import Any

from runner.cli.call import add_talking, configured, read_secrets, request_launch
from runner.cli.shared.options import add_invocation, invocation_of, open_events
from runner.cli.shared.report_file import ReportFile, ReportFileError
from runner.cli.shared.text import say
from runner.contracts.ainb.declared import declared_by
from runner.contracts.ainb.screen import Size, draw, read_rendering, wants_colour
from runner.contracts.ainb.user_input import key_to_wire, read_keys
from runner.outcome import USAGE_ERROR
from runner.protocol.dialect import Call
from sandbox.document.diagnostic import printable

NAME = "render"
EXAMPLE = "runner render ./dist/plugins/burndown --size 80x24 --keys 'down down enter'"

_SIZE = re.compile(r"([0-9]{1,4})x([0-9]{1,4})\Z", re.ASCII)
_DEFAULT_SIZE = "80x24"
_MOST_COLUMNS = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_invocation(parser, launching=True)
    parser.add_argument(
        "--size",
        metavar="WxH",
        default=_DEFAULT_SIZE,
        help="columns and lines of the screen (default: %(default)s)",
    )
    parser.add_argument(
        "--keys",
        metavar="KEYS",
        default="",
        help="keys to press first, with blanks between them: j, enter, ctrl+c, f5, space",
    )
    parser.add_argument(
        "--screen", metavar="ID", default="", help="the screen; without it the first of the manifest"
    )
    add_talking(parser)


def run(args: argparse.Namespace) -> int:
    try:
        invocation, config = configured(invocation_of(args))
        secrets = read_secrets(args)
        width, height = _size(args.size)
        keys = [key_to_wire(key) for key in read_keys(args.keys)]
        sink = ReportFile(args.report)
        events = open_events(args.events)
    except (ReportFileError, ValueError) as error:
        say(f"runner render: {printable(str(error))}")
        return USAGE_ERROR
    sent = request_launch(invocation)
    from runner.cli.live.output import Output
    from runner.cli.live.session import SessionRequest, run_session, write_in_thread
    from runner.session.session import Session

    output = Output("render", as_json=args.json, events=events)

    async def work(session: Session) -> None:
        screens = declared_by(session.terms.plugin).screens
        screen = args.screen or next(iter(screens), "")
        call = Call("render", screen, {"width": width, "height": height})
        value: Any = await session.call(call)
        for key in keys:
            session.notify("plugin/handle_key", {"screen_id": screen, "key": key})
            value = await session.call(call)  # the frame that follows the key
        if args.json:
            await write_in_thread(output.result, value)
        else:
            await write_in_thread(output.tell, _drawn(value).removesuffix("\n"))

    request = SessionRequest(invocation, Call("render", args.screen), None, config, secrets, sink, sent)
    return run_session(request, output, "render", work)


def _drawn(value: Any) -> str:
    is_terminal = sys.stdout.isatty()
    size = Size(value["width"], value["height"])
    buffer = read_rendering({"buffer": value}, size).buffer
    columns = shutil.get_terminal_size().columns if is_terminal else None
    return draw(buffer, colour=wants_colour(os.environ, is_terminal), columns=columns)


def _size(text: str) -> tuple[int, int]:
    match = _SIZE.match(text)
    width, height = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= width <= _MOST_COLUMNS or not 1 <= height <= _MOST_COLUMNS:
        raise ValueError(f"--size {text}: write columns and lines, as in 80x24, up to {_MOST_COLUMNS} each")
    return width, height
