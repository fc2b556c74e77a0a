"""How much text gates are trained on. Free of Transformers: `kvevict plan` prices a training by it."""

LENGTH, LIMIT = 1500, 30_000  # tokens of a piece, and in all
SKIP = 4  # first tokens of a piece: always kept, with hidden states unlike others'


def held_out_of(pieces: int) -> int:
    """How many of the pieces are held out where nobody says."""
    return -(-pieces // 8) if pieces > 1 else 0
