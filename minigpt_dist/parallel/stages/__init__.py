"""The stages of ZeRO: what each rank keeps of gradients and parameters between exchanges, behind one interface.

`shard` is what all have: a slice of the optimizer's state. `stage1` to `stage3` differ in where gradients come from and parameters go;
`reducer` exchanges gradients in backward, `units` gathers parameters for use.
"""
