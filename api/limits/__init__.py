"""Limits of API keys: the file that sets them, and the counters that all servers of a store share."""
