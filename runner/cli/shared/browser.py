"""Opening a link for a person at a desktop."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from runner.cli.shared.text import say

_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")


def open_in_browser(url: str, verb: str) -> None:
    """Where there is no desktop, the link was printed."""
    opener = shutil.which("xdg-open")
    if opener is None or not sys.stdout.isatty() or not any(map(os.environ.get, _DISPLAYS)):
        return
    null = subprocess.DEVNULL
    try:
        subprocess.Popen([opener, url], stdin=null, stdout=null, stderr=null, start_new_session=True)
    except OSError as error:
        say(f"runner {verb}: {opener} does not start: {error.strerror}; open the link in a browser")
