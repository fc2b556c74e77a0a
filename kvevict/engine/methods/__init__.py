"""Parts of single papers that need more than a part of a policy: a file for each."""
