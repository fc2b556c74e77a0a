"""Methods of single papers that are more than a part of a policy, one file each."""
