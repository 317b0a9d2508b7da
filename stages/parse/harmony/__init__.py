"""Tokens of gpt-oss to items."""
