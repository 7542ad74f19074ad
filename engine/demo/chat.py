"""Turns facts into questions and answers and composes conversations from them; knows nothing of tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass

from engine.demo import basics, improvised
from engine.demo.basics import Basic
from engine.demo.facts import Fact
from engine.demo.popularity import focused_weight, weight

TEMPLATES: dict[str, tuple[str, ...]] = {
    "function": (
        "What does {s} do?",
        "What does `{s}` do?",
        "Explain {s}.",
        "What is {s}?",
        "How do I use {s}?",
        "Tell me about {s}.",
        "Describe `{s}`.",
        "What does the {s} function do?",
        "How does {s} work?",
        "What is {s} for?",
        "Explain what {s} does.",
        "Can you explain {s}?",
        "When would I use {s}?",
    ),
    "class": (
        "What is {s}?",
        "What is `{s}`?",
        "Explain the {s} class.",
        "What is the {s} class for?",
        "Describe {s}.",
        "Tell me about {s}.",
        "How do I use {s}?",
        "What does {s} do?",
        "Explain {s}.",
    ),
    "module": (
        "What is the {s} module?",
        "What does the {s} module do?",
        "How do I use the {s} module?",
        "What is {s} used for?",
        "Tell me about the {s} module.",
        "Explain the {s} module.",
        "What is {s}?",
        "What is the `{s}` module for?",
        "Describe the {s} module.",
        "When should I use {s}?",
    ),
    "exception": (
        "What is {s}?",
        "When is {s} raised?",
        "Explain {s}.",
        "What does {s} mean?",
        "Why do I get a {s}?",
        "What causes {s}?",
        "Tell me about {s}.",
    ),
    "attribute": ("What is {s}?", "What is `{s}`?", "Explain {s}.", "What does {s} mean?", "Tell me about {s}."),
    "term": (
        "What is {a}?",
        "What does {s} mean?",
        "Define {s}.",
        "Explain {s}.",
        "What is {a} in Python?",
        "Tell me about {s}.",
        "What is meant by {s}?",
        "Explain what {a} is.",
    ),
    "question": ("{s}",),
    "topic": ("Tell me about {l}.", "Explain {l}.", "What should I know about {l}?", "Describe {l}."),
    "basic": (
        "What is {s}?",
        "What is {s} in Python?",
        "Explain {s}.",
        "Tell me about {s}.",
        "Can you explain {s}?",
        "What is {s}, in simple words?",
        "Explain {s} to a beginner.",
        "Describe {s} in one sentence.",
        "What's {s}?",
        "Please explain {s}.",
        "How does {s} work?",
        "{s}",
        "Explain {s} in one sentence.",
        "Explain what {s} is.",
    ),
    "many": (
        "What are {s}?",
        "What are {s} in Python?",
        "Explain {s}.",
        "Tell me about {s}.",
        "Can you explain {s}?",
        "How do {s} work?",
        "How do I use {s}?",
        "What are {s} for?",
        "Explain {s} to a beginner.",
        "{s}",
        "Tell me something about {s}.",
        "Please explain {s}.",
        "Describe {s}.",
        "Explain {s} in one sentence.",
    ),
    "howto": (
        "How do I {s}?",
        "How do I {s} in Python?",
        "How can I {s}?",
        "How to {s}",
        "Show me how to {s}.",
        "How do you {s} in Python?",
        "I want to {s}.",
        "What is the best way to {s}?",
        "How can I {s} in Python?",
        "Can you show me how to {s}?",
        "How would I {s}?",
        "Explain how to {s}.",
        "Write Python code to {s}.",
    ),
    "program": (
        "Write a function that {s}.",
        "Write a Python function that {s}.",
        "Show me a function that {s}.",
        "Can you write a function that {s}?",
        "Give me a Python function that {s}.",
        "I need a function that {s}.",
        "Please write a Python function that {s}.",
        "How do I write a function that {s}?",
        "Write a program that {s}.",
        "Write some Python code that {s}.",
        "Write a short Python function that {s}.",
    ),
}
EXAMPLE_OF = (
    "Give me an example of {s}.",
    "Show me an example of {s}.",
    "Show me {s} in code.",
    "Write an example with {s}.",
)
EXAMPLE_PLEASE = (
    "Can you show me an example?",
    "Give me an example.",
    "Show me an example.",
    "Show me some code.",
    "For example?",
)
SIGNATURE_QUESTIONS = (
    "What is the signature of {s}?",
    "What arguments does {s} take?",
    "Which parameters does {s} have?",
    "How do I call {s}?",
)
IMPROVISED_SHARE = 0.3
SECTION_SHARES = {"topic": 0.34, "howto": 0.24, "program": 0.2, "talk": 0.22}
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that answers questions about Python.",
    "You are Gatehouse's demo model. Answer briefly.",
    "You answer in one or two sentences.",
    "Answer the user's questions about Python.",
    "You are a friendly Python teacher.",
    "You are a concise assistant.",
    "Be brief and clear.",
)


@dataclass(frozen=True)
class Turn:
    question: str
    answer: str


@dataclass(frozen=True)
class Conversation:
    """A system prompt (empty for none) and at least one turn."""

    system: str
    turns: tuple[Turn, ...]


def _with_article(noun: str) -> str:
    if noun[:1].isupper() or noun.endswith("s") or not noun[:1].isalpha():
        return noun
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _casual(question: str, rng: random.Random) -> str:
    """One question in eight as people type it: no capital, no full stop or question mark."""
    if rng.random() > 0.125:
        return question
    return (question[:1].lower() + question[1:]).rstrip(".?!")


def _function_name(fact: Fact, rng: random.Random) -> str:
    return fact.subject + "()" if fact.kind == "function" and rng.random() < 0.12 else fact.subject


def question_turn(fact: Fact, rng: random.Random) -> Turn:
    """The fact as a question and its answer; sometimes the question is for the signature."""
    if fact.signature and rng.random() < 0.06:
        question = rng.choice(SIGNATURE_QUESTIONS).format(s=fact.subject)
        return Turn(_casual(question, rng), f"The signature is `{fact.signature}`.")
    lowered = fact.subject[:1].lower() + fact.subject[1:]
    template = rng.choice(TEMPLATES[fact.kind])
    question = template.format(s=_function_name(fact, rng), a=_with_article(fact.subject), l=lowered)
    return Turn(_casual(question, rng), answer_text(fact))


def _block(code: str) -> str:
    return f"```python\n{code}\n```"


def answer_text(fact: Fact) -> str:
    return f"{fact.answer}\n\n{_block(fact.code)}" if fact.code else fact.answer


def _topic(basic: Basic, rng: random.Random) -> list[Turn]:
    """A question about the topic; then, often, one for an example."""
    name = rng.choice(basic.names)
    plural = name.endswith("s") and not name.startswith(("the ", "a ", "*"))
    template = rng.choice(TEMPLATES["many"] if plural else TEMPLATES["basic"])
    turns = [Turn(_casual(template.format(s=name), rng), basic.answers[0])]
    if not basic.code:
        return turns
    if rng.random() < 0.2:
        return [Turn(_casual(rng.choice(EXAMPLE_OF).format(s=name), rng), _block(basic.code))]
    if rng.random() < 0.25:
        turns.append(Turn(_casual(rng.choice(EXAMPLE_PLEASE), rng), _block(basic.code)))
    return turns


def basic_turns(basic: Basic, rng: random.Random) -> list[Turn]:
    if basic.section == "topic":
        return _topic(basic, rng)
    name = rng.choice(basic.names)
    if basic.section == "talk":
        return [Turn(_casual(name, rng), rng.choice(basic.answers))]
    question = rng.choice(TEMPLATES[basic.section]).format(s=name)
    answer, code = basic.answers[0], _block(basic.code)
    return [Turn(_casual(question, rng), f"{code}\n\n{answer}" if basic.section == "program" else f"{answer}\n\n{code}")]


class ConversationSampler:
    """Draws conversations: all but `written_share` of the turns from facts by weight. Of the others, `IMPROVISED_SHARE` are
    generated by rules, and the rest are drawn from the hand-written material."""

    def __init__(self, facts: list[Fact], rng: random.Random, written_share: float, focused: bool = False) -> None:
        self.basics = list(basics.read())
        written = {name.lower() for basic in self.basics if basic.section == "topic" for name in basic.names}
        self.facts = [fact for fact in facts if fact.subject.lower() not in written]
        self.weights = [focused_weight(fact) if focused else weight(fact) for fact in self.facts]
        self.rng = rng
        self.written_share = written_share
        self.by_section = {s: [b for b in self.basics if b.section == s] for s in SECTION_SHARES}

    def turns(self) -> list[Turn]:
        """One question and answer, or two that belong together."""
        if self.rng.random() >= self.written_share:
            return [question_turn(self.rng.choices(self.facts, self.weights)[0], self.rng)]
        if self.rng.random() < IMPROVISED_SHARE:
            question, answer = improvised.exchange(self.rng)
            return [Turn(_casual(question, self.rng), answer)]
        section = self.rng.choices(list(SECTION_SHARES), list(SECTION_SHARES.values()))[0]
        return basic_turns(self.rng.choice(self.by_section[section]), self.rng)

    def conversation(self, max_chars: int) -> Conversation:
        """One exchange, or more while a coin flip allows and max_chars is not exceeded; a third have a system prompt."""
        system = self.rng.choice(SYSTEMS) if self.rng.random() < 0.35 else ""
        turns = self.turns()
        size = len(system) + sum(len(t.question) + len(t.answer) for t in turns)
        while self.rng.random() < (0.5 if max_chars < 1500 else 0.9):
            more = self.turns()
            size += sum(len(t.question) + len(t.answer) for t in more)
            if size > max_chars:
                break
            turns.extend(more)
        return Conversation(system, tuple(turns))
