"""Layer 0: the techniques as functions of tensors, modules and plain numbers.

Nothing here knows Lightning: torch and the standard library only.
"""
