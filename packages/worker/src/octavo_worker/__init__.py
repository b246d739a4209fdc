"""Loads a language model and runs it over a paged KV cache."""

__version__ = "0.1.0"
