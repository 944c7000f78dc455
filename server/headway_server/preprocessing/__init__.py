"""Text to ids, image bytes to pixels, ids to text; all but short texts off the event loop."""

from headway_server.preprocessing.chat import ChatPrompt, ChatTemplate, ChatTurn
from headway_server.preprocessing.image import ImageLimits, ImagePreprocessor, ImageTransform, PreparedImage
from headway_server.preprocessing.sentences import Sentence, SplitText, split_sentences
from headway_server.preprocessing.text import EncodedText, TextTokenizer, written_length

__all__ = [
    "ChatPrompt",
    "ChatTemplate",
    "ChatTurn",
    "EncodedText",
    "ImageLimits",
    "ImagePreprocessor",
    "ImageTransform",
    "PreparedImage",
    "Sentence",
    "SplitText",
    "TextTokenizer",
    "split_sentences",
    "written_length",
]
