"""The judge: runs an implementation, and says whether what it showed is right, and if not, where it first went wrong."""
