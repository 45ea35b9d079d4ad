"""Plans that are stored between launches: a launch that was decided once is not decided again.

entry     the file of one plan: found, read, and held against the machine. All that a launch imports
run       a launch from such a plan
store     what may be stored of a plan, and how
unit      the systemd unit of a launch, left out of what is stored
"""
