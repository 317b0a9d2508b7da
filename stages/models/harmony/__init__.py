"""gpt-oss and its Harmony format."""
