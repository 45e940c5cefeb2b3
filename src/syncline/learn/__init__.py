"""The learner's side: the session, the optimizer that users step, the feed."""
