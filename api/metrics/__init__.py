"""Metrics: the route that Prometheus scrapes, and the gauges that mirror the state of the server."""
