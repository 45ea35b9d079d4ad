"""Staged writes on the command line: the verbs changes, diff, apply and discard, and the question after a
run."""
