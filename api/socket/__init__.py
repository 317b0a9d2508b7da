"""The WebSocket transport: one more edge over the same pipeline and runs as HTTP."""
