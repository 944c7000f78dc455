"""aider, with one message."""
# /// script
# dependencies = ["aider-chat==0.86.2"]
# ///

from pathlib import Path

from cases import BASE, CHAT, SENTENCE, called, case, run

# The flags of docs/http.md, and those that keep it from asking and from calling others.
SERVER = ["--model", f"openai/{CHAT}", "--openai-api-base", BASE, "--openai-api-key", "none"]
ALONE = (
    "--no-git --no-check-update --no-show-model-warnings --analytics-disable --yes-always --no-pretty --map-tokens 0"
)

prices = Path.home() / ".aider/caches/model_prices_and_context_window.json"
prices.parent.mkdir(parents=True)
prices.write_text('{"none": {}}')  # which it fetches otherwise


@case("a message, streamed and whole")
def message():
    Path("notes.txt").write_text("a cat")
    for stream in ("--stream", "--no-stream"):
        answer = called("aider", *SERVER, *ALONE.split(), stream, "--message", "Who sat?", "notes.txt")
        assert SENTENCE in answer, answer


run()
