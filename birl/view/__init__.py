"""`birl view`: live page of runs on this machine, read from their folders only."""
