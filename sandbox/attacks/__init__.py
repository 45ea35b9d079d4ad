"""The project's one list of attacks, and the programs that make them.

attacks.py  the list: what each attack tries, which layer must hold, and what counts as held
probe.py    the acts. It is given to a Python inside of a sandbox, as text, and imports nothing of ours
decoy.py    what attacks aim at: files, sockets and a process, in a process of its own that removes them
controls.py a plan with one layer removed
judge.py    reads what probes print, and compares it with the control

`runner doctor --attack` (runner/cli/attacking/) and tests/escape use them.
"""
