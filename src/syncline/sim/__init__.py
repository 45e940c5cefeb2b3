"""The simulated twin: the same sessions and roles in one process, in virtual time."""
