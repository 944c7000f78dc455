"""OpenAI's API: models, completions, chat completions, embeddings and images (docs/http.md)."""

from headway_server.transports.http.openai.form import OPENAI_FORM
from headway_server.transports.http.openai.service import openai_routes

__all__ = ["OPENAI_FORM", "openai_routes"]
