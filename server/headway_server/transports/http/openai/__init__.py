"""OpenAI's API: models, completions, chat completions, embeddings and images (docs/http.md)."""

from headway_server.transports.http.openai.form import OPENAI_FORM
from headway_server.transports.http.openai.multipart import read_form
from headway_server.transports.http.openai.service import OPENAI_ABILITIES, openai_routes

__all__ = ["OPENAI_ABILITIES", "OPENAI_FORM", "openai_routes", "read_form"]
