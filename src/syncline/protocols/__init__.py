"""Pure decisions: events in, decisions out; no torch, no clock, no I/O.

The same objects run under every engine and under property tests.
"""
