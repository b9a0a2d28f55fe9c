"""One run on many processes and machines: we start the launchers that exist, and write no scheduler."""
