"""State alignment (ExLM §3): paths through a DAG of states that emit a sequence of targets.

Knows nothing of tokens or transformers: scores in, likelihood, gradients, posteriors and paths out.
"""

from unmask.alignment.ctc import single_label
from unmask.alignment.recursion import best_path, log_likelihood, path_entropy, posteriors, sample_paths

__all__ = ["best_path", "log_likelihood", "path_entropy", "posteriors", "sample_paths", "single_label"]
