"""The local engine: one process per learner, one per shard, and a supervisor thread in the caller (M11)."""
