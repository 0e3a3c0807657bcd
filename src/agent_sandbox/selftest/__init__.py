"""The self-test behind `verify`: attacks on real sandboxes, each first shown to work without one.

attempts/    what runs inside, as plain functions; never imported by us, only sent
boxes.py     where an attempt runs: on the bare machine, or
sandboxed.py in a sandbox as `run` makes them, or as `Sandbox()` does
bench.py     what is planted outside: secrets, links, a process, a project; and its removal
probes/      each promise that is attacked: plant, let the attempt run, look from outside
trial.py     the same probe without a sandbox and in one, and what follows from the two
"""
