"""`python -m runner`: the same program as the `runner` command."""

from __future__ import annotations

import sys

from runner.cli import main

if __name__ == "__main__":
    sys.exit(main())
