"""Thinwire inside frameworks that bring their own loop, with their gradient averaging turned off in their official way."""
