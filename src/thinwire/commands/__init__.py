"""One module per command of ``thinwire``: options in, an exit code out."""
