"""Role CHECK: how long a prefix of a prompt is stored."""
