"""The version of the protocol that is spoken, its time limits, and where things are in the cage."""

from __future__ import annotations

PROTOCOL = "vai.rpc.v1"

HELLO_SECONDS = 10.0
SHUTDOWN_SECONDS = 5.0

# Where things are in the cage.
PACKAGE = "/sandbox/package"
SCRATCH = "/sandbox/scratch"
SECRETS = "/sandbox/secrets"
