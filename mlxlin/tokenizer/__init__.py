"""Text to tokens and back, without transformers: tokenizer.json, Kimi's tiktoken.model, RWKV World, SentencePiece.

`Tokenizer.from_folder` is the one entry; `Detokenizer` streams tokens to text.
"""

from .core import Tokenizer, holds_tokenizer
from .detokenizer import Detokenizer
from .template import ChatTemplate
from .thoughts import ThoughtSplitter

__all__ = ["ChatTemplate", "Detokenizer", "ThoughtSplitter", "Tokenizer", "holds_tokenizer"]
