"""Converse: alternate between the model and its tools."""
