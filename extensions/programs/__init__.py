"""Programs that the model writes, and that call tools."""
