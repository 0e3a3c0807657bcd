"""What changed? The stored state of a sandbox, and the reading of it.

`project` finds what a sandbox belongs to, `store` keeps its layers between runs and `layers` names them. `beneath` is the one module that
opens what a guest made, `removal` removes it. `stack` is the layers seen as one, by the rules in `merged`; `squash` writes them as one,
`history` says which there are. `readback` compares them with what was there, their `counterpart` in `reality` or the base in `bases`, and
gives `changes`; `renames` finds what was moved, `preview` makes them readable and `noise` tells by-products apart. `drift` says what moved
on in reality, `merging` brings both sides together, `promotion` carries changes over. Nothing here runs anything of a guest.
"""
