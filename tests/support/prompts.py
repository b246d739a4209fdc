"""Twenty prompts of many kinds and lengths, some of which start alike."""

_STORY = (
    "The lighthouse keeper wrote down the weather every evening, in the same blue notebook, for "
    "forty years. He never missed a day, not even when the storm of the century took the roof."
)

PROMPTS = [
    "The",
    "Hello, my name is",
    "The capital of France is",
    "1, 2, 3, 5, 8,",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "Q: What is the boiling point of water?\nA:",
    "Der Himmel ist",
    "今天天气",
    "😀 means happy, 😢 means",
    '{"name": "Ada", "born":',
    "Water, H2O, is made of",
    "To be, or not to be, that is",
    "   leading spaces and\n\n\nblank lines",
    _STORY,
    _STORY + " One morning",
    _STORY + " His daughter",
    _STORY * 2 + " And then",
    _STORY * 2 + " In the end",
    "Repeat after me: " + "la " * 60,
]
