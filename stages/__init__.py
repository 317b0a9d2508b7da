"""Stages: async generators and their machines. Stages do not import each other."""
