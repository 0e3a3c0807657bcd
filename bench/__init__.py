"""Side-by-side benchmarks: what a fresh, isolated run costs with us and with others, on this machine, in one go. See README.md."""
