"""Request body to conversation."""
