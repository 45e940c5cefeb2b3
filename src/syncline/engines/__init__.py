"""On what a run runs: processes and shared memory (`local`), torchrun's processes, a Ray cluster; and what they share."""
