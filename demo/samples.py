"""What the demo asks; all of it was written for it."""

PROMPTS = (
    "DUKE:\nThe night is come, and",
    "FIRST SOLDIER:\nWho goes there?\n\nSECOND SOLDIER:\n",
)
STREAMED_PROMPT = "LADY ANNE:\nMy lord, what news"

CAPTIONS = (
    "A man is riding a bicycle.",
    "Two dogs are running through the snow.",
    "A young girl in a red dress is playing on the beach.",
    "Several people are standing in front of a building.",
    "A woman is reading a book on a bench in the park.",
)
STREAMED_CAPTION = "A boy in a blue shirt jumps into the water."

HEADLINES = (
    "Prime minister and rebel leaders agree to talks after a week of fighting at the border",
    "Late goal sends the home team to the cup final after extra time",
    "Shares of the airline fall as oil prices rise and the company cuts its profit forecast",
    "Researchers release free software that finds security holes in web browsers",
)
