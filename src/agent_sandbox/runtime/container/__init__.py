"""The `container` runtime: programs on the files of a container image."""
