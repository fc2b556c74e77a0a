"""What of a prompt is read next, and which slots go."""
