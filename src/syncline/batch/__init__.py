"""Pure: batch methods as generators of commands (`commands`, `descent`, …), and who computes which portion (`portions`).

No torch, no clock, no I/O: the same objects run under every engine, over plain arrays, and under property tests.
"""
