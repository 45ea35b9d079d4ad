"""Plugins that live: started, watched, restarted and ended by the numbers of their contracts.

Nothing that launches a plugin imports this package.
"""

from runner.lifecycle.exceptions import Overloaded, Unavailable, UnknownPlugin
from runner.lifecycle.spec import LifecycleNews, Spec, Status
from runner.lifecycle.supervisor import Supervisor, open_supervisor

__all__ = [
    "LifecycleNews",
    "Overloaded",
    "Spec",
    "Status",
    "Supervisor",
    "Unavailable",
    "UnknownPlugin",
    "open_supervisor",
]
