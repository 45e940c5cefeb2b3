"""The table: parameters as flat buffers, cut into shards, each with its own optimizer.

`layout` maps names to flat memory, `template` cuts a user's optimizer for the shards, `shard` folds.
"""
