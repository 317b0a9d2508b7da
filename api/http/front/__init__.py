"""The page at ``/``, to try the server in a browser."""
