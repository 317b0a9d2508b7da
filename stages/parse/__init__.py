"""Parsers: from token ids to output items."""
