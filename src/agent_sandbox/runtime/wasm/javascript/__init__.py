"""JavaScript inside WebAssembly: QuickJS, as its maker compiled it, with our console, timers and event loop.

`module_patch` changes the module of QuickJS before it is compiled, the `.js` files define the globals of a program, and `interpreter`
drives QuickJS from the host. Only `interpreter` needs the engine.
"""
