"""Where gradients are folded: the roles of a topology and what they say to each other."""
