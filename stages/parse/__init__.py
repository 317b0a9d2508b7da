"""Token ids to items."""
