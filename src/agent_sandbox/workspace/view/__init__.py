"""What a guest will see: file rules and the machine's mounts become a mount plan. Nothing is mounted here."""
