"""Items to the events of the API."""
