"""`birl view`: runs as a live page on this machine, read from their folders alone."""
