"""How often facts of the documentation are drawn for conversations: popular ones more often than the rest."""

from __future__ import annotations

from engine.demo.facts import Fact

POPULAR_PAGES = ("glossary", "library/functions", "library/stdtypes", "library/exceptions")
POPULAR_MODULES = frozenset(
    [
        "os", "os.path", "sys", "json", "re", "math", "random", "datetime", "time", "collections", "itertools", "functools",
        "pathlib", "csv", "string", "subprocess", "threading", "asyncio", "logging", "argparse", "typing", "dataclasses",
        "unittest", "sqlite3", "copy", "shutil", "glob", "pickle", "contextlib", "enum", "heapq", "bisect", "statistics",
        "decimal", "fractions", "io", "tempfile", "socket", "hashlib", "secrets", "base64", "textwrap", "zipfile", "queue",
        "operator", "urllib.parse", "urllib.request", "calendar", "platform", "getpass", "pprint", "traceback", "inspect",
        "abc", "types", "uuid", "zlib",
    ]
)  # fmt: skip
RARE = ("turtle", "tkinter", "curses", "distutils", "ossaudiodev", "test", "whatsnew", "msilib", "xml", "lib2to3")
FAMOUS = frozenset(
    [
        "os.path.join", "os.path.exists", "os.listdir", "os.getcwd", "os.mkdir", "os.makedirs", "os.remove", "os.walk",
        "os.environ", "sys.argv", "sys.path", "sys.exit", "json.loads", "json.dumps", "json.load", "json.dump",
        "dict.setdefault", "dict.get", "dict.items", "dict.keys", "dict.values", "dict.pop", "dict.update", "list.append",
        "list.extend", "list.pop", "list.sort", "list.insert", "str.join", "str.split", "str.strip", "str.replace",
        "str.format", "str.lower", "str.upper", "str.startswith", "str.endswith", "str.find", "len", "print", "enumerate",
        "zip", "map", "filter", "sorted", "sum", "min", "max", "abs", "round", "open", "input", "isinstance", "type", "int",
        "float", "iter", "next", "any", "all", "reversed", "super", "repr", "eval", "hash", "id", "dir", "help", "getattr",
        "setattr", "ord", "chr", "divmod", "pow", "slice", "random.randint", "random.choice", "random.random",
        "random.shuffle", "math.sqrt", "math.floor", "math.ceil", "datetime.datetime.now", "time.sleep", "time.time",
        "time.perf_counter", "re.findall", "re.sub", "re.match", "re.search", "re.split", "re.compile", "itertools.chain",
        "itertools.product", "itertools.count", "itertools.permutations", "functools.lru_cache", "functools.partial",
        "functools.reduce", "functools.wraps", "collections.Counter", "collections.defaultdict", "collections.deque",
        "collections.OrderedDict", "pathlib.Path", "subprocess.run", "threading.Thread", "threading.Lock", "asyncio.run",
        "asyncio.sleep", "asyncio.gather", "copy.copy", "copy.deepcopy", "shutil.copy", "glob.glob", "csv.reader",
        "csv.writer", "pickle.dumps", "pickle.loads", "logging.info", "heapq.heappush", "heapq.heappop", "statistics.mean",
        "tempfile.TemporaryDirectory", "ValueError", "KeyError", "IndexError", "TypeError", "ZeroDivisionError",
        "StopIteration", "AttributeError", "ImportError", "NameError", "FileNotFoundError", "KeyboardInterrupt",
        "RecursionError", "OSError", "staticmethod", "classmethod", "property",
    ]
)  # fmt: skip


def weight(fact: Fact) -> float:
    """The weight with which a fact is drawn; an ordinary one has 1."""
    source = fact.page.split("/")[-1] if fact.page.startswith("docstring/") else fact.subject
    if fact.page.split("/")[0] in RARE or source.split(".")[0] in RARE:
        return 0.3
    if fact.page in POPULAR_PAGES:
        return 8.0
    if fact.kind == "module":
        return 10.0 if fact.subject in POPULAR_MODULES else 4.0
    if fact.page.startswith("faq/") or fact.page.startswith("tutorial/"):
        return 4.0
    if fact.subject.rpartition(".")[0] in POPULAR_MODULES:
        return 5.0
    return 1.0


def focused_weight(fact: Fact) -> float:
    """As `weight`, sharpened: what newcomers ask about first is drawn far more often than the rest."""
    famous = fact.subject in FAMOUS or (fact.kind == "module" and fact.subject in POPULAR_MODULES)
    return float(weight(fact) ** 1.4 * (3.0 if famous else 1.0))
