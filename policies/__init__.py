"""Operator policies and seccomp profiles, as data. A package so that an installed copy finds its files."""
