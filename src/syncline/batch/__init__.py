"""Pure: batch methods as generators of commands (`commands`, `methods`, …), and who computes which portion (`portions`).

No torch, no clock, no I/O: the same objects run under every engine, over plain arrays, and under property tests.
"""
