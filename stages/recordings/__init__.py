"""Answers from recordings instead of an engine."""
