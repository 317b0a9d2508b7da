"""Stages that an operator may insert."""
