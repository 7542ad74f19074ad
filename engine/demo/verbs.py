"""The verbs with which descriptions in Python's documentation begin, and their third person."""

from __future__ import annotations

VERBS = frozenset(
    [
        "accept", "acquire", "add", "append", "apply", "attach", "block", "bind", "build", "calculate", "call", "cause",
        "change", "check", "clear", "close", "collect", "combine", "compare", "compile", "compute", "configure", "connect",
        "construct", "convert", "copy", "count", "create", "decode", "decompress", "delete", "deserialize", "destroy",
        "determine", "disable", "discard", "display", "do", "download", "dump", "emit", "enable", "encode", "encrypt",
        "end", "enter", "evaluate", "execute", "exit", "expand", "extract", "feed", "fetch", "fill", "filter", "find",
        "finish", "flush", "force", "format", "generate", "get", "give", "handle", "initialize", "insert", "install",
        "invoke", "issue", "iterate", "join", "kill", "list", "load", "locate", "lock", "look", "log", "make", "map",
        "mark", "merge", "modify", "move", "normalize", "notify", "obtain", "open", "pack", "parse", "perform", "place",
        "pop", "prepare", "prepend", "print", "process", "produce", "provide", "push", "put", "query", "quote", "raise",
        "read", "receive", "record", "register", "release", "reload", "remove", "rename", "render", "repeat", "replace",
        "represent", "request", "reset", "resolve", "restore", "resume", "retrieve", "return", "reverse", "rotate", "round",
        "run", "save", "schedule", "search", "seek", "select", "send", "serialize", "set", "show", "shuffle", "shut",
        "skip", "sleep", "sort", "spawn", "specify", "split", "start", "stop", "store", "strip", "subtract", "suspend",
        "swap", "switch", "take", "tell", "terminate", "test", "toggle", "transform", "translate", "truncate", "try",
        "turn", "unlock", "unpack", "unregister", "update", "use", "validate", "verify", "wait", "walk", "wrap", "write",
        "yield", "report", "reduce", "shift", "define", "ensure", "escape", "examine", "explain", "export", "extend",
        "inform", "import", "indicate", "predict", "purge",
    ]
)  # fmt: skip


def third_person(verb: str) -> str:
    if verb.endswith(("s", "sh", "ch", "x", "z", "o")):
        return verb + "es"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + "s"
