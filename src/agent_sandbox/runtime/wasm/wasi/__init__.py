"""The system calls of a program inside WebAssembly that we answer instead of the engine.

For every program: directory listings (`listing`), which the engine would read anew for each few dozen names. For a deterministic program
(`deterministic`): everything that could differ between two runs. That is time, randomness, the order of listings, and file metadata.
"""
