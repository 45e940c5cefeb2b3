"""All-reduce in processes that torchrun has started: no process is started here, rank 0 keeps the record."""
