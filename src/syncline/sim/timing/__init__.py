"""Timing only: how long runs would take, from sizes alone."""
