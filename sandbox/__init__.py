"""The cage: knows Linux, knows no plugin, never imports runner."""
