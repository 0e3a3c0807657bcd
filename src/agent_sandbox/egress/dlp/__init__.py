"""Data-loss prevention: the search for secrets and personal data in what leaves a sandbox."""
