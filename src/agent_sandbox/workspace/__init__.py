"""What changed? The stored state of a sandbox, and the reading of it.

`project` finds what a sandbox belongs to, `store` keeps its layers between runs and `layers` names them. `beneath` is the one module that
opens what a guest made, `removal` removes it. `stack` is the layers seen as one, by the rules in `merged`; `squash` writes them as one.
`readback` compares them with what was there, their `counterpart` in `reality` or the base in `seen`, and gives `changes`; `renames` finds
what was moved, `textdiff` makes them readable and `noise` tells by-products apart. Nothing here runs anything of a guest.
"""
