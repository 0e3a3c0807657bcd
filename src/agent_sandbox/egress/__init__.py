"""The egress: a process of its own that judges whatever leaves a sandbox, and passes it on."""
