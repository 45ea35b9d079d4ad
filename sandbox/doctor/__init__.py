"""Find out by trying what this machine can enforce: for `runner doctor`, and for a launch that has failed.

trial.py           tries system calls and programs in throw-away children
user_namespaces.py finds out what refuses user namespaces
rehearsal.py       builds a whole cage and checks it from inside
limits.py          makes the cgroups of a plugin
conditions.py      reads what weakens a cage from outside
pages.py           finds the pages that messages point to
probes.py          has the remaining probes, and runs all of them
"""
