"""The turns of a model and its tools."""
