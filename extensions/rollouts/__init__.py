"""Rollouts: what models read and wrote in the work of agents, token by token, for whoever trains them."""
