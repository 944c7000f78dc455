"""Text to ids, images to pixels, audio to features, ids to text; off the event loop, except for small inputs."""

from headway_server.preprocessing.answer import AnswerDelta, AnswerReader
from headway_server.preprocessing.chat import ChatPrompt, ChatTemplate, ChatTurn, PromptEnd, TurnImage, WrittenImages
from headway_server.preprocessing.image import ImageLimits, ImagePreprocessor, ImageTransform, PreparedImage
from headway_server.preprocessing.reasoning import ReasoningForm, ReasoningReader, Thought
from headway_server.preprocessing.sentences import Sentence, SplitText, split_sentences
from headway_server.preprocessing.text import EncodedText, TextTokenizer, written_length
from headway_server.preprocessing.tools import (
    CALL_ID,
    CALL_ID_PATTERN,
    Argued,
    CallBegun,
    CallForm,
    CallReader,
    NoToolsError,
    Said,
    Tool,
    ToolCall,
)

__all__ = [
    "CALL_ID",
    "CALL_ID_PATTERN",
    "AnswerDelta",
    "AnswerReader",
    "Argued",
    "CallBegun",
    "CallForm",
    "CallReader",
    "ChatPrompt",
    "ChatTemplate",
    "ChatTurn",
    "EncodedText",
    "ImageLimits",
    "ImagePreprocessor",
    "ImageTransform",
    "NoToolsError",
    "PreparedImage",
    "PromptEnd",
    "ReasoningForm",
    "ReasoningReader",
    "Said",
    "Sentence",
    "SplitText",
    "TextTokenizer",
    "Thought",
    "Tool",
    "ToolCall",
    "TurnImage",
    "WrittenImages",
    "split_sentences",
    "written_length",
]
