"""Stages: async generators and their state machines.  Stages do not import each other."""
