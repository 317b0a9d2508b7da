"""The parser for gpt-oss: from tokens to output items."""
