"""Studies: what replicas do to a training, on one device and from stored rows."""
