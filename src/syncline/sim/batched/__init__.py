"""Simulated gradients, many in one computation: lazily, on one device, with one shared model."""
