"""The system calls of a program inside WebAssembly that are answered here, not by the engine.

For every program: directory listings, which the engine reads anew for each few dozen names (`listing`). For a deterministic one all that
could differ between two runs (`deterministic`): time, randomness, the order of listings, what files tell beyond their content.
"""
