"""Normalize: turn a request body into a conversation."""
