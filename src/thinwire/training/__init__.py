"""The trainer: configuration and recipes, data, models, the loop, checkpoints, progress and reports."""
