"""The built-in prompts, written for this project: from the predictable to the high-entropy.

`CHAT` prompts are instructions for the chat template; `RAW` ones are texts to continue as they stand.
"""

from __future__ import annotations

from collections.abc import Mapping

CHAT = True
RAW = False

COUNTING_AND_LISTS: Mapping[tuple[str, bool], str] = {
    ("numbers", RAW): "Counting up from one:\n1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n11\n12\n13\n14\n",
    ("times_table", RAW): """The seven times table:
7 x 1 = 7
7 x 2 = 14
7 x 3 = 21
7 x 4 = 28
7 x 5 = 35
7 x 6 = 42
""",
    ("months", CHAT): "List the twelve months of the year in order, one per line, each with its number of days.",
    ("calendar", RAW): "Opening hours\n\nMonday: 9:00 - 17:30\nTuesday: 9:00 - 17:30\nWednesday: 9:00 - 17:30\n",
    ("alphabet", CHAT): "Write the letters from A to Z, and after every letter an animal that begins with it.",
}

CODE: Mapping[tuple[str, bool], str] = {
    ("properties", RAW): """class Rectangle:
    def __init__(self, width, height, color):
        self.width = width
        self.height = height
        self.color = color

    def get_width(self):
        return self.width

    def set_width(self, width):
        self.width = width

    def get_height(self):
""",
    ("unit_tests", RAW): """import unittest

class TestAdd(unittest.TestCase):
    def test_add_zero(self):
        self.assertEqual(add(0, 0), 0)

    def test_add_one(self):
        self.assertEqual(add(1, 1), 2)

    def test_add_two(self):
        self.assertEqual(add(2, 2), 4)

    def test_add_three(self):
""",
    ("binary_search", CHAT): "Write a Python function binary_search(items, target), and show how to call it.",
    ("rename", CHAT): """\
Rewrite this function so that `x` is called `price` and `y` is called `quantity`. Answer with the code only.

def total(x, y, tax):
    subtotal = x * y
    if y > 10:
        subtotal = x * y * 0.9
    return subtotal + subtotal * tax
""",
    ("json_records", RAW): """[
  {"id": 1, "name": "Alice", "role": "engineer", "active": true},
  {"id": 2, "name": "Bruno", "role": "designer", "active": true},
  {"id": 3, "name": "Chloe", "role": "engineer", "active": false},
""",
}

EXTRACTION: Mapping[tuple[str, bool], str] = {
    ("delivery", CHAT): """\
Read the message, then copy out the sentence that says when the parcel arrives, word for word.

Thank you for your order from Harbour Lane Books. Your invoice is attached to this message as a PDF. The parcel with
the two atlases will arrive on Thursday the 14th of March between nine and eleven in the morning. If nobody is at home,
the courier will leave it with the neighbour at number 27.
""",
    ("repeat_passage", CHAT): """Repeat the following paragraph exactly, without changing a word.

The lighthouse at Cape Merrin was built in 1874 from grey granite that was carried across the bay in flat barges. Its
lamp burned whale oil for the first nine years and paraffin for the next forty. The last keeper, Ada Thorne, left the
island in 1961, when the light was made automatic.
""",
    ("meeting", CHAT): """List every person named in these notes together with the task given to them.

The budget meeting began at ten. Priya Natarajan will send the revised forecast to the board by Friday. Tomas Lindgren
will call the two suppliers in Oslo and ask for new quotes. Fatima Haddad will book the room for the April review, and
Owen Pryce will write the summary of this meeting.
""",
    ("summary", CHAT): """Summarise this text in two sentences, using its own words where you can.

Honeybees find flowers by scent and by colour, and they tell each other where the flowers are. A bee that has found a
rich meadow returns to the hive and dances on the comb. The angle of the dance shows the direction of the meadow
relative to the sun, and the length of the dance shows how far away it is. Other bees follow the dancer, touch her with
their antennae, and then fly straight to the meadow.
""",
    ("fields", CHAT): """\
Turn this note into lines of the form "field: value" with the fields name, address, city, phone and order.

Please ship order AX-20417 to Margaret Osei, 118 Willow Crescent, Bristol. Her phone number is 0117 496 0822.
""",
}

CHAT_QUESTIONS: Mapping[tuple[str, bool], str] = {
    ("sleep", CHAT): "I have trouble falling asleep at night. What are some habits that could help me?",
    ("sky", CHAT): "Why is the sky blue during the day and red at sunset?",
    ("interview", CHAT): "I have a job interview tomorrow and I am nervous. How should I prepare this evening?",
    ("rice", CHAT): "How do I cook rice in a pot without a rice cooker, so that it does not stick?",
    ("bicycle", CHAT): "My bicycle chain keeps slipping off when I change gears. What should I check first?",
}

PROSE: Mapping[tuple[str, bool], str] = {
    ("lighthouse", CHAT): "Write the opening of a story about a lighthouse keeper who finds a letter in a bottle.",
    (
        "train",
        RAW,
    ): "The train had been standing outside the station for an hour when the old man across from me finally spoke.",
    ("autumn", CHAT): "Write a short poem about the first cold morning of autumn in a small fishing town.",
    ("orchard", RAW): (
        "Nobody in the village could remember who had planted the orchard, but everyone had a story about it. "
        "My grandmother's began with a storm."
    ),
    ("letter", CHAT): "Write a letter from a sailor to his sister about the strangest island that he has seen.",
}

BUILT_IN: Mapping[str, Mapping[tuple[str, bool], str]] = {
    "counting_and_lists": COUNTING_AND_LISTS,
    "code": CODE,
    "extraction": EXTRACTION,
    "chat": CHAT_QUESTIONS,
    "prose": PROSE,
}

EKS_SAMPLE: Mapping[tuple[str, bool], str] = {
    ("numbers", CHAT): "List numbers from one to twenty",
    ("function", CHAT): "Write a simple Python function skeleton",
    ("cat", CHAT): "the cat sat on the mat",
}
"""The prompts with which AWS's sample of speculative decoding on EKS shows when it pays and when it does not."""

ON_REQUEST: Mapping[str, Mapping[tuple[str, bool], str]] = {"eks_sample": EKS_SAMPLE}
"""Workloads that are measured only where they are named."""
