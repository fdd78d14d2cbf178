"""What refinement by perplexity is worth, on text that the target was not trained on.

Start with `refinement.py`.
"""
