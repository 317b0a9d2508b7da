"""Several server processes, called frontends, on one engine and one port."""
