"""Plugins that live: started, watched, restarted and ended by the numbers of their contracts."""
