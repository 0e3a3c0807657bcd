"""Make container images: from an engine's storage, an archive, or the packages of this machine."""
