"""What `diff` prints: the forms it has for people, the document it has for programs, and the patch for git."""
