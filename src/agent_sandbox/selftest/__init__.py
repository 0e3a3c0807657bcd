"""The self-test behind `verify`: attacks on real sandboxes. Each attack is first shown to work without a sandbox.

attempts/    the attacking code, as plain functions; sent into the sandbox as text, never imported by us
boxes.py     the interface of a place where attempts run, and the bare machine without a sandbox
sandboxed.py the sandboxes under attack: one as `run` makes it, one as `Sandbox()` does, and WebAssembly
product.py   the command line under attack, on a scratch project with a state and keys of its own
bench.py     the decoys outside: secrets, links, a process, a project; their removal; and observation from outside
probe.py     a probe, and the judgement from its run without a sandbox and its run in a sandbox
probes/      one probe per attacked promise: plant, let the attempt run, look from outside
walls.py     the inventory of walls, each with its probes or the reason why it has none, and the verdict on each
"""
