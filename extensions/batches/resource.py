"""The resource of batches: the runner, and the routes of both APIs."""
