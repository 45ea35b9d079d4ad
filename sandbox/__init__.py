"""The cage: knows Linux, knows no plugin."""
