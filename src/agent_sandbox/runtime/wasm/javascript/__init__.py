"""JavaScript inside WebAssembly: QuickJS, as its maker compiled it, with a console, timers and an event loop of ours around it.

`adapting` is what is changed in its module before it is compiled, the `.js` files are what a program finds besides the language, and
`interpreter` is how a host drives it. Only the last of them needs the engine.
"""
