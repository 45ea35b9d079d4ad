"""What tests of the host share."""

from tests.peers import peers

__all__ = ["peers"]
