"""Rollouts: the tokens that models read and wrote in the work of agents, for training."""
