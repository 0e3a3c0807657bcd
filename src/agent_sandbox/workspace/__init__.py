"""The stored state of a sandbox, and the changes in it.

`project` finds the project, `store` keeps its sandbox between runs, and `layers` holds the generations of changes. `beneath` is the only
module that opens or removes files a guest made. `layers.readback` compares layers with `reality` or with the `originals`, and returns
`changes`. `diff` shows them. `drift` finds changes on the machine since the clone, `merge` combines both sides, and `promotion` applies
changes to the machine. `view` plans the mounts of a guest. Nothing here runs guest code.
"""
