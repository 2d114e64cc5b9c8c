"""The demo's training text: the prose of Python's own help, which every Python ships with."""

import platform
import re
from dataclasses import dataclass

import torch

PROSE = re.compile(r"[A-Z][\w ,.;:'\"()*“”’-]{80,}[.]")


@dataclass(frozen=True)
class Text:
    """A text as numbers: `characters` [length] index into `vocabulary`, the sorted different characters."""

    title: str
    vocabulary: str
    characters: torch.Tensor

    @classmethod
    def of_python_help(cls) -> "Text":
        """The paragraphs of help("LAMBDAS") and all other articles that are whole sentences, without code."""
        from pydoc_data.topics import topics

        paragraphs = (" ".join(part.split()) for name in sorted(topics) for part in topics[name].split("\n\n"))
        text = "\n".join(paragraph for paragraph in paragraphs if PROSE.fullmatch(paragraph))
        vocabulary = "".join(sorted(set(text)))
        numbers = {character: number for number, character in enumerate(vocabulary)}
        title = f"the help of Python {platform.python_version()}"
        return cls(title, vocabulary, torch.tensor([numbers[character] for character in text]))

    def batch(self, sequence: int, batch: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and the tokens that follow them, [sequence, batch] each, from random offsets."""
        starts = torch.randint(len(self.characters) - sequence, (batch,), generator=generator)
        windows = torch.stack([self.characters[start : start + sequence + 1] for start in starts], dim=1)
        return windows[:-1], windows[1:]
