"""Python and JavaScript inside WebAssembly, inside the same confinement as any other guest: two walls. Needs the extra `wasm`.

`machine` wraps the engine and its host functions. `cache` holds the compiled files, which are checked at each use; `compiler` and
`background_compiler` make them. `zygote_program` and `guest` run in the zygote and in the guest, `runtime` in the supervisor. `one_wall`
runs without the kernel's confinement. Only modules that run in the same process as the engine import it.
"""
