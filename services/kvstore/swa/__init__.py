"""Sliding-window state: directory and host pools."""
