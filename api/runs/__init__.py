"""When a response runs: admission, background, recovery, retention. No module here imports aiohttp."""
