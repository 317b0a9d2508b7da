"""Forced replay: recorded tokens pass through another engine, which says for each how likely it finds it."""
