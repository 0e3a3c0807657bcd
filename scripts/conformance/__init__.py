"""CPython's own tests of its standard library, run natively and inside WebAssembly, and what came out differently. `make conformance`."""
