"""Talk made up by rule, not looked up: counting, sums, capitals, stories, echoes, and saying no to other subjects."""

from __future__ import annotations

import random
from collections.abc import Callable

Exchange = tuple[str, str]

CAPITALS = (
    ("France", "Paris"),
    ("Germany", "Berlin"),
    ("Italy", "Rome"),
    ("Spain", "Madrid"),
    ("Portugal", "Lisbon"),
    ("England", "London"),
    ("Ireland", "Dublin"),
    ("Austria", "Vienna"),
    ("Switzerland", "Bern"),
    ("Poland", "Warsaw"),
    ("Norway", "Oslo"),
    ("Sweden", "Stockholm"),
    ("Denmark", "Copenhagen"),
    ("Finland", "Helsinki"),
    ("Greece", "Athens"),
    ("Japan", "Tokyo"),
    ("China", "Beijing"),
    ("India", "New Delhi"),
    ("Canada", "Ottawa"),
    ("the United States", "Washington"),
    ("Brazil", "Brasilia"),
    ("Australia", "Canberra"),
    ("Egypt", "Cairo"),
    ("the Netherlands", "Amsterdam"),
    ("Belgium", "Brussels"),
)
OTHER_SUBJECTS = (
    "the weather",
    "football",
    "cooking",
    "the stock market",
    "history",
    "the moon",
    "biology",
    "music",
    "politics",
    "quantum physics",
    "my homework",
    "a recipe for bread",
    "movies",
    "medicine",
    "law",
    "cars",
    "dogs",
    "cats",
    "love",
    "the meaning of life",
    "the news",
    "travel",
    "chemistry",
    "art",
    "black holes",
    "dinosaurs",
    "chess",
    "the ocean",
    "gardening",
    "philosophy",
    "economics",
    "the sun",
    "bananas",
    "coffee",
    "tea",
    "mountains",
    "Shakespeare",
    "the Romans",
    "Einstein",
    "Java",
    "JavaScript",
    "C++",
    "Rust",
    "Linux",
    "Docker",
    "Kubernetes",
    "a GPU",
    "CUDA",
    "the internet",
    "blockchain",
    "a transformer",
    "neural networks",
    "attention",
    "a KV cache",
)
OTHER_QUESTIONS = (
    "Tell me about {s}.",
    "What do you think about {s}?",
    "Explain {s}.",
    "What is {s}?",
    "Write an essay about {s}.",
    "Can you help me with {s}?",
    "What do you know about {s}?",
    "Write an email about {s}.",
    "How does {s} work?",
    "Give me a summary of {s}.",
    "Do you like {s}?",
    "Why is {s} important?",
)
SORRY = (
    "I do not know much about that. I am a small demo model trained on Python's documentation, so ask me about Python.",
    "That is outside what I was trained on. I only know a little about Python.",
)
WORDS = (  # noqa: SIM905, a list of quoted words reads worse
    "apple banana river stone window garden yellow purple rocket silver forest pencil butter orange candle mirror "
    "winter summer pepper bridge castle dragon feather hammer island jacket kitten ladder market needle ocean parrot "
    "queen rabbit saddle tiger umbrella violin walnut zebra python gatehouse"
).split()
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
HEROES = ("fox", "robot", "cat", "turtle", "snake", "girl", "boy", "teacher", "bird", "mouse", "dragon", "bear", "dog")
NAMES = ("Ada", "Ben", "Clara", "Dino", "Eve", "Finn", "Grace", "Hugo", "Ida", "Max", "Nora", "Otto", "Pia", "Rosa")
PLACES = ("in a small house by the river", "at the edge of a forest", "in a quiet town", "on a hill near the sea")
WISHES = (
    ("learn Python", "a thin book about Python"),
    ("count the stars", "an old telescope"),
    ("sort all the books in the library", "a long list"),
    ("build a small computer", "a box full of wires"),
    ("find the way to the sea", "a map on the table"),
    ("write a song", "a pencil and some paper"),
)
MIDDLES = (
    "The first day went badly, and nothing worked at all.",
    "A friend came by and said that small steps are the best steps.",
    "It rained for three days, so there was plenty of time to practise.",
    "Every evening there was one small mistake fewer than the day before.",
    "At first it seemed too hard, but the work became easier every day.",
    "An old owl watched from a tree and nodded slowly.",
)
ENDS = (
    "In the end it worked, and everybody in the neighbourhood came to see it.",
    "After a week it was done, and {n} was very happy.",
    "Then {n} smiled, closed the door and slept well that night.",
)


def counting(rng: random.Random) -> Exchange:
    start = rng.choice((1, 1, 1, rng.randint(0, 20)))
    stop = start + rng.randint(2, 14) if rng.random() < 0.6 else 10
    first, last = (NUMBERS[start], NUMBERS[stop]) if start < stop <= 12 and rng.random() < 0.4 else (start, stop)
    forms = ["Count from {a} to {b}.", "Please count from {a} to {b}.", "Print the numbers from {a} to {b}."]
    forms += ["Count to {b}.", "Can you count to {b}?"] * (2 if start == 1 else 0)
    return rng.choice(forms).format(a=first, b=last), ", ".join(map(str, range(start, max(start, stop) + 1))) + "."


def arithmetic(rng: random.Random) -> Exchange:
    left, right = rng.randint(0, 12), rng.randint(0, 12)
    sign, word, value = rng.choice(
        (("+", "plus", left + right), ("+", "plus", left + right), ("*", "times", left * right), ("-", "minus", left - right))
    )
    form = rng.choice(("What is {a} {s} {b}?", "What is {a} {w} {b}?", "{a} {s} {b}", "How much is {a} {s} {b}?"))
    return form.format(a=left, b=right, s=sign, w=word), f"{left} {sign} {right} is {value}."


def capital(rng: random.Random) -> Exchange:
    country, city = rng.choice(CAPITALS)
    form = rng.choice(("What is the capital of {c}?", "Which city is the capital of {c}?", "Name the capital of {c}."))
    return form.format(c=country), f"The capital of {country} is {city}."


def decline(rng: random.Random) -> Exchange:
    return rng.choice(OTHER_QUESTIONS).format(s=rng.choice(OTHER_SUBJECTS)), rng.choice(SORRY)


def echo(rng: random.Random) -> Exchange:
    words = " ".join(rng.sample(WORDS, rng.choice((1, 1, 2, 3))))
    form = rng.choice(('Say "{w}".', "Say {w}.", "Repeat after me: {w}", "Please repeat: {w}", 'Repeat "{w}".'))
    return form.format(w=words), words + "."


def my_name(rng: random.Random) -> Exchange:
    name = rng.choice(NAMES)
    form = rng.choice(("My name is {n}.", "I am {n}.", "Hello, I am {n}.", "Hi, my name is {n}."))
    return form.format(n=name), f"Hello {name}, nice to meet you! Ask me something about Python."


def story(rng: random.Random) -> Exchange:
    hero, name, (wish, thing) = rng.choice(HEROES), rng.choice(NAMES), rng.choice(WISHES)
    form = rng.choice(
        (
            "Tell me a story.",
            "Tell me a story about a {h}.",
            "Write a short story about a {h}.",
            "Write a short story.",
            "Write a story about a {h}.",
            "Once upon a time",
            "Tell me a short story.",
            "Write a story.",
        )
    )
    middles = rng.sample(MIDDLES, rng.randint(1, 3))
    start = f"Once there was a {hero} named {name} who lived {rng.choice(PLACES)}."
    want = f"More than anything, {name} wanted to {wish}. One morning {name} found {thing} and began at once."
    return form.format(h=hero), " ".join([start, want, *middles, rng.choice(ENDS).format(n=name)])


KINDS: tuple[tuple[float, Callable[[random.Random], Exchange]], ...] = (
    (2.0, counting),
    (1.2, arithmetic),
    (0.5, capital),
    (1.2, decline),
    (0.6, echo),
    (0.4, my_name),
    (1.0, story),
)


def exchange(rng: random.Random) -> Exchange:
    """A question and its answer, of a kind drawn by weight."""
    return rng.choices([make for _, make in KINDS], [share for share, _ in KINDS])[0](rng)
