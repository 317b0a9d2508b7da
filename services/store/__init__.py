"""The store: responses and conversations in SQLite or PostgreSQL."""
