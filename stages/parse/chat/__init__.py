"""Tokens of a model with a chat template to items."""
