"""OpenAI's API: models, completions, chat completions, embeddings and images (docs/http.md)."""

from headway_server.transports.http.openai.form import OPENAI_FORM
from headway_server.transports.http.openai.service import OPENAI_ABILITIES, openai_routes
from headway_server.transports.http.openai.transcription import read_form

__all__ = ["OPENAI_ABILITIES", "OPENAI_FORM", "openai_routes", "read_form"]
