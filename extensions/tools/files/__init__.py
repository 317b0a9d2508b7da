"""Files of a conversation, read as text."""
