"""What single papers need beyond a part of a policy, a file each."""
