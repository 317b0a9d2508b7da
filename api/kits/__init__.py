"""Kits of checks for what others write: `penstock.testing` offers them."""
