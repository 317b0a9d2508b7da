"""Models with a chat template: how prompts are written, and how their output is read."""
