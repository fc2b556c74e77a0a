"""The cost and the steps of a read, seen from outside."""
