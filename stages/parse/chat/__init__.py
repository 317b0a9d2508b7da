"""The parser for models with a chat template: from tokens to output items."""
