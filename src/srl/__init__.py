"""Train language models to search."""

__version__ = "0.1.0"
