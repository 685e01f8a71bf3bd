"""Storage node: DATA and META halves."""
