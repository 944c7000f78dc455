"""Inputs for a load test that names none: short texts of several lengths, and pictures."""

from __future__ import annotations

from headway_client.load.pictures import sample_pictures
from headway_client.load.plan import LoadTask

PROMPTS = (
    "ROMEO:\n",
    "The king said to his men:\n",
    "First Citizen:\nWe have waited long enough at this gate, and no one",
    "What light is this that comes before the morning,\nAnd why",
    "My lord, the ships are back from the north and they bring news of the war. Shall I call",
    "O",
)
SENTENCES = (
    "A dog runs.",
    "Two children are playing in the snow.",
    "A man in a blue shirt is standing on a ladder cleaning a window.",
    "A woman is riding a bicycle down a busy street in the rain.",
    "Several people sit around a table in a small restaurant and look at a map together.",
    "A young boy jumps into a lake.",
)
HEADLINES = (
    "Stocks fall as oil prices climb for a third day",
    "Striker scores twice in the last ten minutes to win the cup",
    "Ministers meet to end the long dispute over fishing waters",
    "New chip doubles the battery life of small phones, its maker says after a year of tests in three countries",
    "Telescope finds water on a distant planet",
    "Airline to cut one job in ten after a weak summer; shares rise on the news while unions call for talks",
)


def sample_inputs(task: LoadTask) -> list[str] | list[bytes]:
    """The built-in inputs of a task."""
    match task:
        case LoadTask.GENERATE:
            return list(PROMPTS)
        case LoadTask.TRANSLATE:
            return list(SENTENCES)
        case LoadTask.CLASSIFY:
            return list(HEADLINES)
        case LoadTask.LABEL:
            return sample_pictures()
