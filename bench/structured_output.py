"""Structured output over real schemas: how many are supported, whether grammars are exact, the cost of compilation and masks.

Usage: python -m bench.structured_output SCHEMAS.jsonl [--libraries ours,llguidance,xgrammar]

A line of the file is {"name", "schema", "tests": [{"valid", "data"}]} (the format of MaskBench, arXiv 2501.10868). Every
instance is written both compactly and with the usual spaces, tokenised, and checked token by token against the mask. Random
documents are then drawn, each token uniformly from those that the mask allows, and validated by the package `jsonschema`, which
is independent of any grammar. Times are CPU times, because the machine may be busy. Each library runs in a process of its own,
so that a hang or crash costs only the schema that caused it. One JSON row per run is appended to
bench/results/structured_output.jsonl.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import select
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
from jsonschema.validators import validator_for
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.grammar_libraries import LIBRARIES, Follower, Library, Refused, Stopped
from bench.rows import TREE, argument_parser, row_header, save_row
from engine.grammar.vocabulary import Vocabulary, vocabulary_of

TRAINING_BYTES = 12_000_000
SCHEMA_DEADLINE_S = 30.0
VOCAB_SIZE = 32_000
SAMPLES = 3
"""Random documents for each schema."""
SAMPLE_TOKENS_MAX = 600
PATIENCE_TOKENS = 60
"""Tokens after which drawing a random document begins to favour tokens that end it."""


def training_text() -> Iterator[str]:
    """Text available on every machine: Python's standard library and this repository."""
    size = 0
    folders = [TREE / "docs", TREE / "engine", TREE / "appliance", Path(sysconfig.get_paths()["stdlib"])]
    for folder in folders:
        for path in sorted(folder.glob("*.[pm][yd]")):
            text = path.read_text("utf-8", errors="replace")
            size += len(text)
            yield text
            if size > TRAINING_BYTES:
                return


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer with about VOCAB_SIZE tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    return tokenizer


class SchemaChecker:
    """Tests one library on schemas."""

    def __init__(self, library: Library, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        self.library = library
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        closing = (b'"', b"}", b"]", b'"}', b"0", b"1")
        self.closing = {i for i, token in enumerate(vocabulary.tokens) if token in closing}
        self.mask_us: list[float] = []
        self.stopped = 0

    def run(self, name: str, schema: Any, tests: list[dict[str, Any]]) -> dict[str, Any]:
        start = time.process_time()
        self.mask_us, self.stopped = [], 0
        try:
            compiled = self.library.compile(json.dumps(schema))
        except Refused as error:
            return {"name": name, "refused": str(error)[:300]}
        answer: dict[str, Any] = {"name": name, "compile_ms": 1e3 * (time.process_time() - start)}
        wrong = [(i, test["valid"]) for i, test in enumerate(tests) if not self.agrees(compiled, schema, test)]
        answer["wrongly_accepted"] = [i for i, valid in wrong if not valid]
        answer["wrongly_refused"] = [i for i, valid in wrong if valid]
        answer |= self.sample(compiled, schema, random.Random(name))
        answer["stopped"] = self.stopped
        answer["mask_us"] = [round(us, 1) for us in self.mask_us]
        return answer

    def mask(self, follower: Follower) -> Sequence[int]:
        start = time.thread_time()
        row = follower.mask()
        self.mask_us.append(1e6 * (time.thread_time() - start))
        return row

    def agrees(self, compiled: Any, schema: Any, test: dict[str, Any]) -> bool:
        data = reorder_properties(schema, test["data"])
        texts = (json.dumps(data, separators=(",", ":")), json.dumps(data, ensure_ascii=False))
        try:
            return all(self.accepts(compiled, text) == test["valid"] for text in texts)
        except Stopped:
            self.stopped += 1
            return False

    def accepts(self, compiled: Any, text: str) -> bool:
        follower = self.library.follow(compiled)
        for token_id in self.tokenizer.encode(text).ids:
            if not allows(self.mask(follower), token_id) or not follower.accept(token_id):
                return False
        return allows(self.mask(follower), self.vocabulary.eos_token_ids[0])

    def sample(self, compiled: Any, schema: Any, rng: random.Random) -> dict[str, Any]:
        """Draw random documents; count those that ended, and list those that `jsonschema` rejects."""
        validator = validator_for(schema, default=jsonschema.Draft202012Validator)
        ended, bad = 0, []
        for _ in range(SAMPLES):
            try:
                text = self.draw(compiled, rng)
            except Stopped:
                self.stopped += 1
                continue
            if text is None:
                continue
            ended += 1
            problem = _validation_error(validator, schema, text)
            if problem:
                bad.append([text[:500], problem[:200]])
        return {"drawn": SAMPLES, "ended": ended, "bad": bad}

    def draw(self, compiled: Any, rng: random.Random) -> str | None:
        """Draw one random text; None if it did not end in time."""
        follower = self.library.follow(compiled)
        written = bytearray()
        for step in range(SAMPLE_TOKENS_MAX):
            allowed = allowed_ids(self.mask(follower))
            if not allowed:
                return None
            prefers_end = step > PATIENCE_TOKENS * rng.random()
            ends = [i for i in allowed if i in self.vocabulary.eos_token_ids]
            closing = ends or [i for i in allowed if i in self.closing]
            token_id = rng.choice(closing if prefers_end and closing else allowed)
            if token_id in self.vocabulary.eos_token_ids:
                return written.decode()
            if not follower.accept(token_id):
                return None
            written += self.vocabulary.tokens[token_id]
        return None


def allows(mask: Sequence[int], token_id: int) -> bool:
    """Whether a mask, 32 tokens a word, allows a token."""
    return bool(mask[token_id // 32] >> token_id % 32 & 1)


def allowed_ids(mask: Sequence[int]) -> list[int]:
    """All tokens that a mask allows; most words of a mask are zero."""
    return [32 * index + bit for index, word in enumerate(mask) if word for bit in range(32) if word >> bit & 1]


def reorder_properties(schema: Any, data: Any) -> Any:
    """The data with its properties in the order of the schema."""
    if not isinstance(schema, dict):
        return data
    if isinstance(data, list):
        items = schema.get("items")
        return [reorder_properties(items, item) for item in data]
    if not isinstance(data, dict):
        return data
    listed = schema.get("properties")
    listed = listed if isinstance(listed, dict) else {}
    names = [name for name in listed if name in data] + [name for name in data if name not in listed]
    return {name: reorder_properties(listed.get(name, schema.get("additionalProperties")), data[name]) for name in names}


def _validation_error(validator: Any, schema: Any, text: str) -> str:
    """Why `jsonschema` rejects a text; empty if it is valid."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"not JSON: {error}"
    try:
        error = next(validator(schema).iter_errors(value), None)
    except (OverflowError, ArithmeticError, RecursionError, TypeError) as problem:
        return "" if isinstance(problem, OverflowError) else f"validator: {problem}"
    return "" if error is None else f"{error.validator}: {error.message}"


def serve(library: str) -> None:
    """Main loop of one library's process: reads a schema per line, writes an answer per line."""
    tokenizer = make_tokenizer()
    data = json.loads(tokenizer.to_str())
    vocabulary = vocabulary_of(data, tokenizer.get_vocab_size(), [0])
    checker = SchemaChecker(LIBRARIES[library](vocabulary), tokenizer, vocabulary)
    print(json.dumps({"vocab": vocabulary.size}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(checker.run(job["name"], job["schema"], job["tests"])), flush=True)


class Runner:
    """Feeds one library's process and replaces it if it hangs or crashes."""

    def __init__(self, library: str, arguments: argparse.Namespace) -> None:
        self._command = [sys.executable, "-m", "bench.structured_output", arguments.schemas, "--serve", library]
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, line: bytes) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=TREE)
            self._read(600.0)
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()
        answer = self._read(SCHEMA_DEADLINE_S)
        if answer is None:
            self._process.kill()
            self._process.wait()
            self._process = None
            return {"name": json.loads(line)["name"], "lost": True}
        return answer

    def _read(self, deadline_s: float) -> dict[str, Any] | None:
        assert self._process is not None
        assert self._process.stdout is not None
        end, received = time.monotonic() + deadline_s, b""
        while not received.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._process.stdout.fileno(), 1 << 20) if ready else b""
            if not data:
                return None
            received += data
        answer: dict[str, Any] = json.loads(received)
        return answer

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def percentile(values: Sequence[float], percent: int) -> float:
    return round(statistics.quantiles(values, n=100)[percent - 1], 3) if len(values) > 1 else 0.0


def summary(library: str, answers: list[dict[str, Any]], tests: dict[str, list[bool]]) -> dict[str, Any]:
    compiled = [answer for answer in answers if "compile_ms" in answer]
    compiles, masks = [a["compile_ms"] for a in compiled], [us for a in compiled for us in a["mask_us"]]
    exact = [a for a in compiled if not a["wrongly_accepted"] and not a["wrongly_refused"]]
    total = collections.Counter(valid for a in compiled for valid in tests[a["name"]])
    return {
        "library": library,
        "schemas": len(answers),
        "supported_percent": round(100 * len(compiled) / len(answers), 1),
        "lost": sum("lost" in answer for answer in answers),
        "wrongly_accepted": sum(len(a["wrongly_accepted"]) for a in compiled),
        "invalid_instances": total[False],
        "wrongly_refused": sum(len(a["wrongly_refused"]) for a in compiled),
        "valid_instances": total[True],
        "schemas_exact_percent": round(100 * len(exact) / len(answers), 1),
        "stopped": sum(a["stopped"] for a in compiled),
        "drawn": sum(a["drawn"] for a in compiled),
        "ended": sum(a["ended"] for a in compiled),
        "drawn_invalid": sum(len(a["bad"]) for a in compiled),
        "compile_ms_p50": percentile(compiles, 50),
        "compile_ms_p99": percentile(compiles, 99),
        "mask_us_p50": percentile(masks, 50),
        "mask_us_p99": percentile(masks, 99),
        "mask_us_max": max(masks, default=0.0),
        "schema_mask_us_p99": percentile([statistics.median(a["mask_us"]) for a in compiled if a["mask_us"]], 99),
    }


@cache
def installed(library: str) -> str | None:
    try:
        return version("llguidance" if library == "ours" else library)
    except ImportError:
        return None


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("schemas", help="a file of schemas with instances, one JSON object a line")
    parser.add_argument("--libraries", default="ours,llguidance,xgrammar")
    parser.add_argument("--limit", type=int, default=None, help="check only the first schemas, this many")
    parser.add_argument("--details", type=Path, default=None, help="write every answer to this file")
    parser.add_argument("--serve", choices=LIBRARIES, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    lines = Path(arguments.schemas).read_bytes().splitlines(keepends=True)[: arguments.limit]
    tests = {job["name"]: [test["valid"] for test in job["tests"]] for job in map(json.loads, lines)}
    rows = []
    for library in arguments.libraries.split(","):
        if installed(library) is None:
            print(f"{library} is not installed")
            continue
        runner = Runner(library, arguments)
        answers = []
        for line in lines:
            answers.append(runner.check(line))
            if arguments.details:
                with arguments.details.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"library": library, **answers[-1]} | {"mask_us": []}) + "\n")
        runner.close()
        rows.append(summary(library, answers, tests) | {"version": installed(library)})
        print(json.dumps(rows[-1], indent=1))
    save_row({**row_header("structured_output"), "vocab": VOCAB_SIZE, "results": rows}, arguments)


if __name__ == "__main__":
    main()
