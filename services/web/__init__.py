"""HTTP requests to the web that cannot reach private networks."""
