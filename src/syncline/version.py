"""Which syncline this is."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("syncline")
except PackageNotFoundError:  # a checkout on the path, not installed
    VERSION = "not installed"
