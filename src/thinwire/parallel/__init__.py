"""Processes that train together: how they start, find each other, and average gradients where DeMo is not used."""
