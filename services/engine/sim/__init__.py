"""An engine without a network: deterministic tokens, pattern bytes, real schedulers around it."""
