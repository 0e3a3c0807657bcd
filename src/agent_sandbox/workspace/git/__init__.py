"""Git repositories as files: objects, packs, the index and references. git itself is never run."""
