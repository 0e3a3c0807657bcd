"""JavaScript inside WebAssembly: QuickJS, as its maker compiled it, with our console, timers and event loop.

`module_patch` changes its module before compilation, the `.js` files are the globals of a program, and `interpreter` drives it from the
host. Only `interpreter` needs the engine.
"""
