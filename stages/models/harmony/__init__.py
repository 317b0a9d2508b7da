"""Facts about gpt-oss."""
