"""A cluster as a record: computation, links, costs; those with a name; this machine as it was measured."""
