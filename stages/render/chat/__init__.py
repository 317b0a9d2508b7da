"""The renderer for models with a chat template: from a conversation to token ids."""
