"""``thinwire bench``: what an optimizer step costs, Thinwire's beside others', on this machine."""
