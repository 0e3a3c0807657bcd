"""The `gvisor` runtime: a guest on a kernel in user space. `runsc` runs as an outer program on the view that `process` would have.

`runsc` names the program, its features and its command line, `bundle` the configuration of a container, `agent` what runs inside before the
guest's program, `guest` the supervisor's handle, and `probe` the live try.
"""
