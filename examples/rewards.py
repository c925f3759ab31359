"""A reward function as TRL calls it, for examples/train_grpo.yaml."""

from typing import Any


def short_words(completions: list[Any], **columns: Any) -> list[float]:
    """The share of a completion's words that have five letters at most.

    Args:
        completions: of each prompt; lists of messages where prompts are, else texts.
        columns: of the rows, such as ``prompt``, a list for each.
    """
    rewards = []
    for completion in completions:
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        words = text.split()
        rewards.append(sum(len(word) <= 5 for word in words) / max(1, len(words)))
    return rewards
