"""One run as a page: what `minigpt-dist report` reads, draws and writes."""
