"""What this machine can enforce, found by trying. Only `runner doctor` uses it, never a launch.

trial.py           does things in throw-away children
user_namespaces.py says who forbade one
rehearsal.py       builds a whole cage and looks around in it
limits.py          makes the cgroups of a plugin
conditions.py      reads what weakens a cage from outside
probes.py          asks all of them
"""
