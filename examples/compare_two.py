"""Compares plain and fused decoding on prompts of its own: `python examples/compare_two.py [toy]`."""

import sys

from tandem import compare

if __name__ == "__main__":
    comparison = compare(
        ["Summarize: the cat sat on the mat, and then the cat sat on the mat again.", "Count from one to ten."],
        architectures=("autoregressive", "fused"),
        max_new_tokens=24,
        backend=sys.argv[1] if len(sys.argv) > 1 else "torch",
    )
    print(comparison)
