"""What every route shares: bodies, errors, keys, pages of lists, server-sent events, the OpenAPI document."""
