"""`python -m runner`: the same program as the `runner` command."""

from __future__ import annotations

from runner.cli import entry

if __name__ == "__main__":
    entry()
