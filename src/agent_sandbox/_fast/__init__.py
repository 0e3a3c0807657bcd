"""Parts of the standard library that load in microseconds, for the start-up path and for guests. Elsewhere the real ones are used."""
