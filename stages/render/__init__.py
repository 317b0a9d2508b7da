"""Conversation to token ids."""
