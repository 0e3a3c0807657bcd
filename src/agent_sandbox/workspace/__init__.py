"""What changed? The stored state of a sandbox, and the reading of it.

`project` finds what a sandbox belongs to, `store` keeps its layers between runs and `layers` names them. `beneath` is the one module that
opens what a guest made, `removal` removes it. `readback` compares it with `reality` and gives `changes`; `preview` makes them readable and
`noise` tells by-products apart. Nothing here runs anything of a guest.
"""
