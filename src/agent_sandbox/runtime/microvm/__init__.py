"""The `microvm` runtime: a native program or Python code in a virtual machine with a kernel of its own, on the same view as `process`.

QEMU runs inside a guest of the `process` runtime, behind all its walls. Nothing of this package is needed by other runtimes.
"""
