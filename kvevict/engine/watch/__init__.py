"""What a read costs, and what it does, seen from outside."""
