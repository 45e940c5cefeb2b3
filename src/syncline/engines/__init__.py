"""On what a run runs: `local` (processes and shared memory) and `sim` (virtual time, one process)."""
