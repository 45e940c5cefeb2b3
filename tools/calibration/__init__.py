"""Calibration: this machine as a cluster, measured by microbenchmarks. Not part of the wheel."""
