"""The renderer for gpt-oss: from a conversation to token ids."""
