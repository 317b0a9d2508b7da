"""Renderers: from a conversation to token ids."""
