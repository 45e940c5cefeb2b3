"""What always holds, checked on a simulated run after every event: accounts of its own beside the protocols'."""
