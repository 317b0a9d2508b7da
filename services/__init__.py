"""Services: they live as long as the server, and stages use them."""
