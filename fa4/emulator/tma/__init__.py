"""The machine-independent part of TMA and bulk copies: descriptors, addresses, reductions.

`descriptor` reads a tensor map, `transfer` plans which bytes one copy moves, `swizzle` permutes
shared addresses, `reduction` combines bytes. Nothing here knows threads, time or barriers.
"""
