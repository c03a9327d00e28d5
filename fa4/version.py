"""The version of the package, for everything that stamps its output with it."""

__version__ = "0.2.0"
