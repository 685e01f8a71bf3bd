"""Where shards lie: one interface, several kinds of storage."""
