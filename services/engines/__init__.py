"""Engines: vLLM in this process or over HTTP, recordings, scripts."""
