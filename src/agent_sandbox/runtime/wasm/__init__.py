"""Python inside WebAssembly, inside the same confinement as any other guest: two walls. Needs the extra `wasm`.

`machine` is the engine and what it offers a program, `cache` what is compiled once and checked each time, `building` who compiles,
`zygote_program` and `guest` what runs where, and `runtime` the supervisor's side. Only those that run where the engine is import it.
"""
