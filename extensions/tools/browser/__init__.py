"""The browser: search, open and find, as gpt-oss was trained to use them."""
