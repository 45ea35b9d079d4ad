"""The host side: knows plugins and speaks their protocols. The cage itself is in sandbox/."""

__version__ = "0.1.0"
