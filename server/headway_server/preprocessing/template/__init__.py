"""Chat templates: a sandbox to run them in, and texts that know who wrote what."""

from headway_server.preprocessing.template.environment import RefusedConversationError, TemplateEnvironment, write
from headway_server.preprocessing.template.limits import MAX_TEXT_LENGTH, LimitError
from headway_server.preprocessing.template.marked_text import MarkedText

__all__ = ["MAX_TEXT_LENGTH", "LimitError", "MarkedText", "RefusedConversationError", "TemplateEnvironment", "write"]
