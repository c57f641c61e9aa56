"""What runs where the command was given: hostfiles, launchers, a job's processes and its end.

A launcher is a function in `launchers`. No torch. May import: supervision, network, and the ground.
"""
