"""Makes training prompts without the target's chat template: other templates, other languages, the target's raw text.

A draft that saw only the target's own template guesses badly wherever a user types plain text.
"""

from __future__ import annotations

import random

from tandem.workshops.training import words

# Openings from which the target writes raw text itself, one at random; the empty one leaves it all to the target.
STARTS = (
    "", "", "", "", "The", "A", "In", "It", "This", "When", "If", "How", "What", "Why", "I", "We", "You", "They", "He",
    "She", "There", "As", "On", "At", "For", "To", "With", "After", "Many", "One", "Our", "My", "New", "First", "Today",
    "Once upon a time", "In this article", "According to", "Chapter 1", "Abstract", "Introduction", "Question:", "Q:",
    "Table of contents", "Step 1:", "1.", "- ", "* ", "# ", "## ", "Dear", "Subject:", "From:", "Ingredients", "Note",
    "import", "from", "def ", "class ", "#include", "package", "public class", "function ", "const ", "let ", "var ",
    "SELECT", "CREATE TABLE", "<!DOCTYPE html>", "<div", "<?php", "{", "[", "---\n", "```python\n", "$ ", "//", "/*",
    "\\section{", "\\begin{", "Theorem", "Let $", "| ", "Date,", "id,name", "GET /", "HTTP/1.1", "2023-", "[INFO]",
    "Le", "La", "Les", "Un", "Der", "Die", "Das", "Ein", "El", "Los", "Una", "Il", "Gli", "O", "Os", "De", "Het", "Den",
    "В", "На", "Это", "日本", "中国", "这", "今天", "Το", "Het is", "Jest", "Bu", "Ang", "Hola", "Bonjour", "Guten Tag",
)  # fmt: skip

_TEMPLATES = (
    "User: {t}\nAssistant:", "Human: {t}\n\nAssistant:", "Q: {t}\nA:", "Question: {t}\nAnswer:",
    "### Instruction:\n{t}\n\n### Response:\n", "[INST] {t} [/INST]",
    "<s>[INST] <<SYS>>\nYou are a helpful assistant.\n<</SYS>>\n\n{t} [/INST]", "{t}\n\n", "{t}\n",
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{t}\n\n### Response:\n", "USER: {t} ASSISTANT:", "<|user|>\n{t}\n<|assistant|>\n",
    "Me: {t}\nYou:", "<start_of_turn>user\n{t}<end_of_turn>\n<start_of_turn>model\n", "Customer: {t}\nAgent:",
    "Student: {t}\nTeacher:",
)  # fmt: skip

_FRAGMENTS = (
    "Bonjour, je m'appelle {n} et j'habite à {c}.", "La maison de {n} est grande et", "Il était une fois un roi qui",
    "Les enfants de {c} aiment beaucoup", "Je voudrais acheter {p} pommes et", "Aujourd'hui, nous allons apprendre",
    "Guten Morgen, mein Name ist {n} und ich", "Die Stadt {c} liegt", "Es war einmal ein kleines Mädchen, das",
    "Der Zug nach {c} fährt um {p} Uhr", "Ich möchte gern {p} Brötchen und", "Heute lernen wir, wie man",
    "Hola, me llamo {n} y vivo en {c}.", "La ciudad de {c} tiene", "Había una vez un perro que", "Hoy vamos a aprender",
    "El {d} fui al mercado con {n} y", "Me gusta mucho", "Buongiorno, mi chiamo {n} e abito a {c}.", "C'era una volta",
    "La città di {c} è", "Olá, meu nome é {n} e eu moro em {c}.", "A cidade de {c} fica", "Era uma vez",
    "Gosto muito de", "Hallo, ik ben {n} en ik woon in {c}.", "De stad {c} heeft", "Hej, jag heter {n} och jag bor i",
    "Cześć, mam na imię {n} i", "Привет, меня зовут {n} и я", "Сегодня мы", "Merhaba, benim adım {n} ve",
    "こんにちは、私の名前は{n}です。", "今日は", "你好，我叫{n}，我住在", "今天天气", "안녕하세요, 제 이름은",
    "Γεια σας, με λένε {n} και", "Salut, mă numesc {n} și", "Translate to French: {s} =>", "English: {s}\nFrench:",
    "English: {s}\nGerman:", "English: {s}\nSpanish:", "Spanish: Buenos días, {n}.\nEnglish:",
    "French: Où est la gare de {c} ?\nEnglish:", "uno, dos, tres,", "un, deux, trois,", "eins, zwei, drei,",
    "lundi, mardi,", "Montag, Dienstag,", "lunes, martes,", "gennaio, febbraio,",
)  # fmt: skip


def in_a_template(rng: random.Random, text: str) -> tuple[str, bool]:
    """Returns an instruction in the template of another model, perhaps after an earlier turn, as raw text."""
    template = rng.choice(_TEMPLATES)
    if rng.random() < 0.25:
        greeting = rng.choice(("Hello!", "Hi, can you help me?", "Good morning.", "Thanks!", f"I am {_name(rng)}."))
        reply = rng.choice(("Hello! How can I help you?", "Of course.", "You are welcome.", "Sure, what do you need?"))
        return f"{template.format(t=greeting)} {reply}\n{template.format(t=text)}", False
    return template.format(t=text), False


def fragment(rng: random.Random) -> tuple[str, bool]:
    """Returns the beginning of a text in a language other than English, or of a translation."""
    sentence = f"{_name(rng)} {rng.choice(('lives in', 'went to', 'likes', 'comes from'))} {rng.choice(words.CITIES)}."
    text = rng.choice(_FRAGMENTS).format(
        n=_name(rng), c=rng.choice(words.CITIES), p=rng.randint(2, 20), d=rng.randint(1, 30), s=sentence
    )
    return text, False


def own_raw(rng: random.Random, texts: tuple[str, ...]) -> tuple[str, bool]:
    """Returns the first words, a random number of them, of a text that the target wrote without a template."""
    text = rng.choice(texts)
    return text[: rng.randint(12, 240)], False


def _name(rng: random.Random) -> str:
    return rng.choice(words.NAMES)
