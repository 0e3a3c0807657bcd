"""Values and encodings that load in microseconds, for the start-up path and for guests. Elsewhere the standard library is used."""
