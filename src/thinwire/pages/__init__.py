"""Self-contained HTML pages with figures: of a run, and of all results. Needs the standard library alone."""
