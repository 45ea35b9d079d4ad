"""Operator policies and seccomp profiles, as data. A package only so that an installed copy finds its files."""
