"""What Syncline is measured against, one module per peer.

Each has `run(dims, batch_size, workers, seconds) -> float`: gradients per second, summed over the workers,
measured after a warm-up in the same processes, one thread each. `python -m benchmarks.peers.ddp 784-128-10 32 2`
runs one alone.
"""
