"""Links that are as thin as asked for, and every method on them. Nothing here is needed to train."""
