"""Roles CHECK and STORE."""
