"""WHAT WOULD IT DO?  A command run on a throw-away clone, what it did there as a plan, and that plan carried out."""
