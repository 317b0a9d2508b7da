"""Facts about models with a chat template."""
