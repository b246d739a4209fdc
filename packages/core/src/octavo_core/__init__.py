"""The scheduling brain of an LLM server: no torch, no GPU."""

__version__ = "0.1.0"
