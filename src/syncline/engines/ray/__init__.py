"""The cluster's engine: Ray places and watches, tensors go over sockets of our own."""
