"""Roles: leader, log applier, coordinators, the root of a tree. An event comes in, effects go out through a port."""
