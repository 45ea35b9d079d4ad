"""What tests of the sandbox share: their processes are forked from a template."""

from tests.template import quick_root, quick_runner, quick_user, templates

__all__ = ["quick_root", "quick_runner", "quick_user", "templates"]
