"""Train gates for the bundled model on made-up facts: those that lie in its folder.

    python examples/train_gates.py --out DIR

The texts' names are none that the tasks of `kvevict eval` ask for.
"""

import argparse

from train_lookahead import pairs

import kvevict
from kvevict.models.loading import load_model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="folder for the gates")
    parser.add_argument("--texts", type=int, default=72, help="of 100 to 1,000 tokens; default 72")
    args = parser.parse_args()
    model, tokenizer = load_model(kvevict.small_llama(), "float32")
    texts = [pair["prompt"] for pair in pairs(tokenizer, args.texts, 1000, seed=0)]
    made = kvevict.gates.train(model, texts, args.out, length=1000, limit=1000 * len(texts), held_out=12)
    held = made.about["held_out"]
    print(f"R^2 {held['r2']:.2f}, recall {held['recall']}")


if __name__ == "__main__":
    main()
