"""`python -m runner`: the same program as the `runner` command."""

from __future__ import annotations

import os
import sys

# -m puts the working directory first on the search path. A plugin may be able to write there, and we import
# modules also after it has run. Started from our own checkout, we need the entry to find ourselves.
if not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
    del sys.path[0]

from runner.cli import entry

if __name__ == "__main__":
    entry()
