"""Conversation to the tokens of a model with a chat template."""
