"""Benchmarks: each script answers one question and prints machine, commit and date above its table."""

import os

# Read when torch is loaded: it warns of every address without a name, as those in network namespaces are.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# A display asks runs for statistics, which costs time.
os.environ.setdefault("SYNCLINE_PROGRESS", "off")
