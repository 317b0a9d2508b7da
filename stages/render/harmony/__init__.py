"""Conversation to the tokens of gpt-oss."""
