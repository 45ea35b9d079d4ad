"""What this machine can enforce, found by trying: only for `runner doctor`, never on the way of a launch.

trial.py does things in throw-away children, refusal.py says who forbade one, rehearsal.py builds a whole cage
and looks around in it, conditions.py reads what weakens one from outside, probes.py asks all of them.
"""
