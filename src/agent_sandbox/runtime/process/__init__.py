"""The `process` runtime: guests forked from a warm zygote into namespaces of their own, on a copy-on-write view of this machine."""
