"""The life of a response: admission, background, recovery, retention. No module here imports aiohttp."""
