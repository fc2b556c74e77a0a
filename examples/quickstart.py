"""Read a long text with a budget of KV slots, next to the same model unpatched.

    python examples/quickstart.py [--model DIR_OR_HUB_ID] [--file TEXT] [--budget 512] [--policy take]

Without --model a small random Llama reads made-up text: the numbers are real, its answers are noise. The context of a
model limits the prompt: longer text is cut (--limit).
"""

import argparse
import random

from kvevict.analysis.run import encode, load_model, measure
from kvevict.commands import add_budget, add_policy, build_policies, read_text
from kvevict.commands.generate import table


def random_model(context=32768):
    """A 4-layer random Llama over bytes, and a tokenizer that is one byte a token."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    bytes_only.pre_tokenizer, bytes_only.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=context, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval(), PreTrainedTokenizerFast(tokenizer_object=bytes_only)


def made_up_text(words=3000):
    """Sentences that say nothing, the same every time."""
    pick = random.Random(0).choice
    nouns = ["harbour", "lantern", "winter", "letter", "garden", "engine", "river"]
    verbs = ["keeps", "follows", "hides", "answers", "moves"]
    return " ".join(f"The {pick(nouns)} {pick(verbs)} the {pick(nouns)}." for _ in range(words // 5))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id of a Transformers causal language model")
    parser.add_argument("--file", help="text to read")
    add_policy(parser)
    add_budget(parser)
    parser.add_argument("--question", default="What is this text about?", help="what follows the text")
    parser.add_argument("--limit", type=int, help="prompt tokens at most; default: what the model's context holds")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="length of the answer at most")
    args = parser.parse_args()

    policy = build_policies([args.policy], args, progress=True)[args.policy]
    text = read_text(args.file) if args.file else made_up_text()
    model, tokenizer = load_model(args.model) if args.model else random_model()
    ids = encode(model, tokenizer, text, args.question, args.max_new_tokens, args.limit).row(model.device)
    runs = {
        "unpatched": measure(model, tokenizer, ids, max_new_tokens=args.max_new_tokens),
        args.policy: measure(model, tokenizer, ids, policy, args.max_new_tokens),
    }
    print(table(runs, ids.shape[1]))
    kept = runs[args.policy]["report"]["kept"]
    print("\nslots kept per layer (first row):", [layer and layer[0] for layer in kept])


if __name__ == "__main__":
    try:
        main()
    except (ValueError, TypeError, OSError) as error:
        raise SystemExit(f"quickstart: {error}") from None
