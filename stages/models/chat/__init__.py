"""Models with a chat template, through vLLM's templates and parsers."""
